"""Attention for the peer where no flash-attention package is installed.

``transformers`` packs ragged batches only on its flash path, and takes that path's kernel from a package. PyTorch has
the same kernel built in. ``builtin-flash`` hands it over, so that the peer is measured on the path that it is made
for; without it the peer builds dense masks.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gapless.errors import UnavailableError

NAMES = ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
         "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn")  # fmt: skip


def builtin_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **unused: Any,
) -> torch.Tensor:
    """``flash_attn_varlen_func`` on PyTorch's own FlashAttention 2. ``[tokens, heads, head_dim]``, grouped queries."""
    window = {name: n for name, n in zip(("window_size_left", "window_size_right"), window_size, strict=True) if n >= 0}
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False,
        scale=softmax_scale, **window,
    )  # fmt: skip
    return out[0]  # type: ignore[no-any-return]


@contextmanager
def attention(model: Any, name: str, device: torch.device) -> Iterator[None]:
    """The model with the peer's attention; as it was afterwards.

    Args:
        name: ``auto`` is the package if there is one, else ``builtin-flash`` on a GPU in half precision, else sdpa;
            anything else is handed to transformers.
    """
    half = model.dtype in (torch.float16, torch.bfloat16)
    if name == "auto":
        package = importlib.util.find_spec("flash_attn") is not None
        builtin = "builtin-flash" if device.type == "cuda" and half else "sdpa"
        name = "flash_attention_2" if package and half else builtin
    config = model.config
    before = config._attn_implementation
    if name != "builtin-flash":
        try:
            model.set_attn_implementation(f"paged|{name}" if _has_prefix() and "|" not in name else name)
            yield
        finally:
            config._attn_implementation_internal = before
        return
    if not (device.type == "cuda" and half):
        raise UnavailableError("--peer-attention builtin-flash needs a GPU and float16 or bfloat16")
    import transformers.modeling_flash_attention_utils as flash

    saved = {n: getattr(flash, n) for n in NAMES if hasattr(flash, n)}
    if "_flash_varlen_fn" not in saved or not hasattr(flash, "_lazy_define_process_function"):
        raise UnavailableError("this transformers has no place for builtin-flash: try --peer-attention sdpa")
    chosen = "paged|flash_attention_2" if _has_prefix() else "flash_attention_2"
    made: Any = flash
    made._loaded_implementation = chosen
    made._flash_fn, made._flash_with_kvcache_fn = None, None
    made._flash_varlen_fn = builtin_varlen
    made._pad_fn, made._unpad_fn = made._pad_input, made._unpad_input
    made._process_flash_kwargs_fn = made._lazy_define_process_function(builtin_varlen)
    config._attn_implementation_internal = chosen  # the checked setter would look for the package
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        for n, value in saved.items():
            setattr(flash, n, value)


def _has_prefix() -> bool:
    """Up to about 5.19 the paged forms of attention had names of their own."""
    from transformers import ContinuousBatchingConfig

    return "page_size" not in inspect.signature(ContinuousBatchingConfig).parameters
