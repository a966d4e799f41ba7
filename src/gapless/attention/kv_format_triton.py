# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""`gapless.attention.kv_format` in kernels. Without scales, and in a cache of the model's dtype, it adds nothing.

``scales_ptr`` is fp32 ``[2, HK]``, or None, which Triton takes as a constant: a kernel without scales has no such
parameter.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)


@triton.jit
def encode(x, dtype: tl.constexpr, scales_ptr, head, mask):
    """``x`` as the cache keeps it. ``head``: of each number, in ``[2 HK]`` with the values' heads last; ``mask``: which
    of them exist."""
    if scales_ptr is not None:
        x = tl.div_rn(x.to(tl.float32), tl.load(scales_ptr + head, mask=mask, other=1.0))
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)
