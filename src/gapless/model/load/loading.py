"""From a folder, a Hub name, a GGUF file or a model object to a `TransformersModel`, and its tokenizer.

Runs once, before the engine's threads exist. Weights come from safetensors only: others can run code on load.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from gapless.attention import reference
from gapless.errors import ConfigError, did_you_mean
from gapless.model import checks
from gapless.model.adapter import TransformersModel
from gapless.model.hybrid.layer import ple_tables
from gapless.model.load.gguf import convert_cached
from gapless.model.load.size import refuse_too_large
from gapless.model.probe import probe_parity
from gapless.model.token_rows import AttentionBackend

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TEXT_PARTS = frozenset({"qwen4_exp"})
"""By ``model_type``: models of text and images whose text part ``transformers`` reads from the same checkpoint."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What `load_model` returns.

    Attributes:
        model: ready to run.
        tokenizer_source: what `load_tokenizer` takes; None for a model object that names no source.
        seconds: that loading took.
        weight_gib: size of the parameters.
    """

    model: TransformersModel
    tokenizer_source: str | None
    seconds: float
    weight_gib: float


def load_model(
    model: str | Path | PreTrainedModel,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device,
    attention: AttentionBackend = reference.attend,
    max_model_len: int | None = None,
    probe: bool = True,
    ple_tables_on_host: bool = False,
    num_drafts: int = 0,
) -> LoadedModel:
    """Load, check and wrap a model.

    Args:
        model: a folder of Hugging Face format, a name on the Hub, the path of a ``.gguf`` file (converted
            once into a cached folder; set ``GAPLESS_CACHE`` to move the cache), or a model object, which is
            not changed.
        dtype: of the weights. "auto" keeps the checkpoint's own dtype; for a GGUF file, whose integer weights
            have none, it is fp32 on a CPU and bf16 elsewhere. A model object keeps its dtype, and must not be
            given another.
        device: where to. Weights of a folder are read straight to it, if ``accelerate`` is there.
        attention: runs a layer's attention, by default the CPU's form.
        max_model_len: longest context that will be asked for; see `checks.fix_longrope`.
        probe: compare prefill and decode with the model's own attention; see `gapless.model.probe`.
        ple_tables_on_host: leave tables of n-grams in host memory; see `gapless.model.parts.ple_host`. A model object
        has
            them there already, or is refused.
        num_drafts: most tokens of a step that may be taken back.

    Raises:
        ConfigError: nothing can be loaded from ``model``, or ``dtype`` is unknown.
        UnsupportedModelError: the model has a part that would be computed wrongly.
        ImportError: a GGUF file, and the packages that read it are missing.
    """
    start = time.perf_counter()
    if not isinstance(model, (str, Path, PreTrainedModel)):
        raise ConfigError(
            f"model of type {type(model).__name__} is not allowed: a folder, name, .gguf file or transformers model"
        )
    chosen = _parse_dtype(dtype)
    if isinstance(model, PreTrainedModel):
        if chosen not in (None, model.dtype):
            raise ConfigError(
                f"dtype={dtype!r}: the model object is {model.dtype}; leave 'auto', or convert it with .to()"
            )
        if model.device.type != device.type or (device.index is not None and model.device != device):
            raise ConfigError(
                f"device={str(device)!r}: the model object lies on {model.device}; move it with .to() first"
            )
        if ple_tables_on_host and any(table.weight.device.type != "cpu" for table in ple_tables(model)):
            raise ConfigError(
                f"ple_tables_on_host=True: the tables of the model object lie on {model.device}; move them to the CPU"
            )
        module, source, name = model, str(getattr(model.config, "_name_or_path", "")) or None, None
    else:
        source, is_gguf = _resolve(model)
        if chosen is None and is_gguf:
            chosen = torch.float32 if device.type == "cpu" else torch.bfloat16
        module = _read(source, chosen, device, ple_tables_on_host)
        name = Path(str(model)).name if Path(source).exists() else str(model)
    if ple_tables_on_host and not ple_tables(module):
        raise ConfigError(f"ple_tables_on_host=True: {type(module).__name__} has no per-layer embeddings of n-grams")
    wrapped = TransformersModel(
        module, attention=attention, name=name, max_model_len=max_model_len, num_drafts=num_drafts
    )
    if probe:
        probe_parity(wrapped)
    return LoadedModel(wrapped, source, time.perf_counter() - start, wrapped.weight_bytes / 2**30)


def load_tokenizer(source: str | Path | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder, Hub name or GGUF file; None if it has none.

    Raises:
        ConfigError: there are tokenizer files, but they cannot be read.
    """
    if source is None:
        return None
    try:
        where, _ = _resolve(source)
    except ConfigError:
        return None
    if Path(where).is_dir() and not any((Path(where) / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where)
    except OSError:
        if Path(where).is_dir():
            raise ConfigError(f"tokenizer={str(source)!r}: its tokenizer files cannot be read") from None
        return None
    except (ValueError, ImportError) as error:
        raise ConfigError(f"tokenizer={str(source)!r}: cannot be read: {error}") from error
    return tokenizer


def _parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if dtype == "auto":
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"dtype={name!r} is not one of auto, {', '.join(DTYPES)}.{did_you_mean(name, DTYPES)}"
        )
    return DTYPES[name]


def _resolve(model: str | Path) -> tuple[str, bool]:
    """What ``from_pretrained`` takes, and whether it came from a GGUF file."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model={str(model)!r}: there is no such file")
        return str(convert_cached(path)), True
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model={str(model)!r}: the folder has no config.json, so it is not a Hugging Face model"
            )
        return str(path), False
    if path.is_file():
        raise ConfigError(
            f"model={str(model)!r}: is a file; give a folder, a name on the Hub or a .gguf file"
        )
    text = str(model)
    if isinstance(model, Path) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or not text:
        raise ConfigError(f"model={text!r}: there is no such folder")
    return text, False


def _read(source: str, dtype: torch.dtype | None, device: torch.device, tables_on_host: bool) -> PreTrainedModel:
    """Config first, so that what cannot be served is refused before its weights are fetched."""
    folder = Path(source)
    config = _read_config(source)
    checks.check_config(config)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model={source!r}: the folder has no *.safetensors; only this format of weights is read"
        )
    refuse_too_large(source, config.dtype if dtype is None else dtype, device)
    direct = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None and not tables_on_host
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # a library is quiet; the caller's setting comes back below
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype="auto" if dtype is None else dtype,
            use_safetensors=True,
            attn_implementation="eager",
            **({"device_map": {"": device}} if direct else {}),
        )
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model={source!r}: its weights cannot be read as safetensors: {error}") from error
    finally:
        if bar:
            transformers_logging.enable_progress_bar()
    return move_but_tables(model, device) if tables_on_host else model.to(device)


def move_but_tables(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move all parameters and buffers of ``model``, but for the tables of n-grams. Tied ones stay tied."""
    moved = {table.weight: table.weight for table in ple_tables(model)}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in moved:
                    moved[parameter] = nn.Parameter(parameter.data.to(device), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


def _read_config(source: str) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source)
    except OSError as error:
        hint = ""
        if not Path(source).is_dir():
            hint = (
                " It is no folder here, and could not be fetched from the Hub: check the name, the "
                "network and HF_HUB_OFFLINE, log in if it is private, or give a local folder."
            )
        if source == "smollm2":
            hint = " Only the commands know that name; in a program give gapless.model.load.smollm2.get_smollm2()."
        raise ConfigError(
            f"model={source!r}: its config cannot be read.{hint} ({_first_line(error)})"
        ) from error
    except ValueError as error:  # an architecture that this transformers does not know
        raise ConfigError(f"model={source!r}: {_first_line(error)}") from error
    return config.get_text_config() if config.model_type in TEXT_PARTS else config


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
