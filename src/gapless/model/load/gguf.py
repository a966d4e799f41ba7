"""GGUF files, converted once into Hugging Face folders in a cache.

Nothing heavy is imported until a conversion is needed, so that finding a folder that exists takes no time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

FORMAT = 2
"""Raise it when `convert` writes something else than before; models are then converted anew."""


def cache_root() -> Path:
    """Where converted models live: ``$GAPLESS_CACHE``, else ``gapless`` in the user's cache folder."""
    if own := os.environ.get("GAPLESS_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gapless"


def cached_folder(path: Path) -> Path:
    """The folder of a GGUF file, whether it exists yet or not. Path, size and time of change are its key."""
    stat = path.stat()
    key = hashlib.sha256(
        f"{FORMAT}\n{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()
    ).hexdigest()
    return cache_root() / "gguf" / f"{path.stem}-{key[:16]}"


def convert_cached(path: Path) -> Path:
    """A Hugging Face folder with the file's weights, config and tokenizer; converted on the first call.

    Raises:
        ImportError: the packages that read GGUF are missing.
    """
    folder = cached_folder(path)
    if not folder.exists():
        make_folder(folder, lambda target: convert(path, target))
    return folder


def make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a new folder atomically: it appears under its name complete or not at all, also in a race."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(temporary)
        temporary.chmod(0o755)
        # A folder that is there already came from another process, and holds the same.
        with contextlib.suppress(OSError):
            temporary.rename(folder)
        if not folder.exists():
            raise RuntimeError(f"could not move the converted model to {folder}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_gguf(what: str) -> None:
    """Raise ImportError if the packages that read GGUF are missing; ``what`` is what needs them."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"to read {what} install {' and '.join(missing)}: the extra 'gguf' of gapless brings them")


def convert(path: Path, folder: Path) -> None:
    """Write the weights of a GGUF file as fp32 safetensors, with config, generation config and tokenizer.

    fp32 because a dequantized weight, scale * integer + offset, is exact there and not in bf16; and because
    fp32 is what a CPU multiplies quickest unless it has bf16 units.
    """
    require_gguf(str(path))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from gapless.model.config_checks import check_config
    from gapless.model.load.complete import check_complete
    from gapless.model.load.gguf_config import config_of, ends_of
    from gapless.model.load.gguf_file import read_gguf
    from gapless.model.load.gguf_tensors import tensors_of

    file = read_gguf(path)
    fields = config_of(file)
    config = AutoConfig.for_model(**fields)
    config.dtype = torch.float32
    check_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = tensors_of(file, fields)
    own = model.state_dict()
    tied = {"lm_head.weight"} if fields["tie_word_embeddings"] else set()
    found = {
        "missing_keys": set(own) - set(tensors) - tied,
        "unexpected_keys": set(tensors) - set(own),
        "mismatched_keys": {
            (name, tuple(tensor.shape), tuple(own[name].shape))
            for name, tensor in tensors.items()
            if name in own and tensor.shape != own[name].shape
        },
    }
    check_complete(found, str(path), allow_missing=())
    model.load_state_dict(tensors, assign=True, strict=False)
    model.tie_weights()
    model.generation_config.eos_token_id = ends_of(file) or None
    model.save_pretrained(folder)
    if "tokenizer.ggml.model" in file.values:
        where = {"gguf_file": file.path.name, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), **where)
        tokenizer.chat_template = file.values.get("tokenizer.chat_template") or tokenizer.chat_template
        tokenizer.save_pretrained(folder)
