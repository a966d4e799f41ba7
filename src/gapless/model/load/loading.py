"""From a folder, a Hub name, a GGUF file or a model object to a `TransformersModel`, and its tokenizer.

Runs once, before the engine's threads exist. Weights come from safetensors only: others can run code on load.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils import logging as transformers_logging

from gapless.attention import reference
from gapless.errors import ConfigError, UnsupportedModelError, did_you_mean
from gapless.model.adapter import TransformersModel
from gapless.model.config_checks import check_config, longest_context
from gapless.model.hybrid.layer import ple_tables
from gapless.model.load import files, hub
from gapless.model.load.complete import check_complete, check_finite
from gapless.model.load.gguf import convert_cached
from gapless.model.load.size import refuse_too_large
from gapless.model.load.smollm2 import get_smollm2
from gapless.model.probe import probe_parity
from gapless.model.token_rows import AttentionBackend

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TEXT_PARTS = frozenset({"qwen4_exp"})
"""By ``model_type``: models of text and images whose text part ``transformers`` reads from the same checkpoint."""
QUANTIZATION_FILES = {
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "ModelOpt",
    "quant_strategy.json": "FP8",
}
"""How older tools said that a folder is quantized."""
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
    allow_missing: Sequence[str] = (),
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
        allow_missing: see `gapless.model.load.complete.check_complete`.

    Raises:
        ConfigError: nothing can be loaded from ``model``, its weights are not whole or not finite, ``dtype`` is
            unknown, or ``max_model_len`` is longer than the model's context.
        UnsupportedModelError: the model has a part that would be computed wrongly.
        ImportError: a GGUF file, and the packages that read it are missing.
    """
    start = time.perf_counter()
    _check_kind(model)
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
        module = _read(source, str(model), chosen, device, ple_tables_on_host, max_model_len, allow_missing)
        name = Path(str(model)).name if Path(source).exists() else str(model)
    if ple_tables_on_host and not ple_tables(module):
        raise ConfigError(f"ple_tables_on_host=True: {type(module).__name__} has no per-layer embeddings of n-grams")
    check_finite(module, name or type(module).__name__, [table.weight for table in ple_tables(module)])
    wrapped = TransformersModel(
        module, attention=attention, name=name, max_model_len=max_model_len, num_drafts=num_drafts
    )
    if probe:
        probe_parity(wrapped)
    return LoadedModel(wrapped, source, time.perf_counter() - start, wrapped.weight_bytes / 2**30)


def check_source(model: str | Path) -> None:
    """Refuse what the config of a folder, name or GGUF file shows, before anything else of it is read.

    Raises:
        ConfigError, UnsupportedModelError: as `load_model`.
    """
    source, _ = _resolve(model)
    check_config(_read_config(Path(source), str(model)))


def model_folder(model: str | Path) -> Path:
    """The folder that `load_model` reads for a folder, a name or a GGUF file."""
    return Path(_resolve(model)[0])


def load_tokenizer(source: str | Path | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder, Hub name or GGUF file; None if it has none.

    Raises:
        ConfigError: there is no such source, or there are tokenizer files, but they cannot be read.
    """
    if source is None:
        return None
    where, _ = _resolve(source)
    folder = Path(where)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    _refuse_own_code(folder, str(source))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except OSError:
        raise ConfigError(f"tokenizer={str(source)!r}: its tokenizer files cannot be read") from None
    except Exception as error:  # the tokenizers' own parser raises a plain Exception
        raise ConfigError(f"tokenizer={str(source)!r}: cannot be read: {_first_line(error)}") from error
    return tokenizer


def _refuse_own_code(folder: Path, name: str) -> None:
    """For a tokenizer that needs a Python module of its folder: ``transformers`` would advise to run it."""
    path = folder / "tokenizer_config.json"
    options = files.read_json(path, name) if path.is_file() else {}
    own = options.get("auto_map")
    own = own.get("AutoTokenizer") if isinstance(own, dict) else own
    kind = str(options.get("tokenizer_class") or "")
    if own and tokenizer_class_from_name(kind) is None and tokenizer_class_from_name(f"{kind}Fast") is None:
        raise ConfigError(
            f"tokenizer={name!r}: its class {kind or own} is code of the model's folder, which gapless never runs. "
            "Give a tokenizer of transformers: LLM(..., tokenizer=...)"
        )


def _check_kind(model: object) -> None:
    if isinstance(model, (str, Path)):
        return
    if type(model).__name__.startswith("Peft"):
        raise ConfigError(
            f"model of type {type(model).__name__} is not allowed: give model.merge_and_unload(), or its base model "
            "with enable_lora=True and the adapter by load_lora"
        )
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model of type {type(model).__name__} is not allowed: a folder, name, .gguf file or transformers model"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no head that chooses tokens; only models that generate text (...ForCausalLM) "
            "are supported"
        )


def _parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if dtype == "auto":
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"dtype={name!r} is not one of auto, {', '.join(DTYPES)}.{did_you_mean(name, DTYPES)}"
        )
    return DTYPES[name]


def _resolve(model: str | Path, *, weights: bool = False) -> tuple[str, bool]:
    """A folder of Hugging Face's form, and whether it came from a GGUF file."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model={str(model)!r}: there is no such file")
        return str(convert_cached(path)), True
    if path.is_dir():
        return str(path), False
    if path.is_file():
        raise ConfigError(
            f"model={str(model)!r}: is a file; give a folder, a name on the Hub or a .gguf file"
        )
    text = str(model)
    if text == "smollm2":
        return str(get_smollm2()), False
    if isinstance(model, Path) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or not text:
        raise ConfigError(f"model={text!r}: there is no such folder")
    return str(hub.fetch(text, weights=weights)), False


def _read(
    source: str,
    name: str,
    dtype: torch.dtype | None,
    device: torch.device,
    tables_on_host: bool,
    max_model_len: int | None,
    allow_missing: Sequence[str],
) -> PreTrainedModel:
    """Config first, so that what cannot be served is refused before its weights are fetched."""
    config = _read_config(Path(source), name)
    check_config(config)
    longest = longest_context(config)
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(f"max_model_len={max_model_len} is more than the {longest} positions of {name}")
    folder = Path(_resolve(name, weights=True)[0])
    files.check_weight_files(folder, name)
    refuse_too_large(str(folder), config.dtype if dtype is None else dtype, device)
    direct = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None and not tables_on_host
    with _quiet():
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype="auto" if dtype is None else dtype,
                use_safetensors=True,
                trust_remote_code=False,
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they come back in `found`, with all that is wrong besides
                **({"device_map": {"": device}} if direct else {}),
            )
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model={name!r}: its weights cannot be read as safetensors: {error}") from error
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ConfigError(f"model={name!r}: its weights do not fit its config: {_first_line(error)}") from error
    check_complete(found, name, allow_missing)
    loaded: PreTrainedModel = model
    return move_but_tables(loaded, device) if tables_on_host else loaded.to(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """``transformers`` without bar and report: a library is quiet, and what is wrong is an error of ours."""
    bar, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()


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


def _read_config(folder: Path, name: str) -> PreTrainedConfig:
    raw = files.read_config(folder, name)
    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        own = " It brings code of its own (auto_map), which gapless never runs." if raw.get("auto_map") else ""
        raise ConfigError(
            f"model={name!r}: transformers {transformers.__version__} knows no model of type {kind!r}.{own} A newer "
            "transformers may know it"
        )
    for file, method in QUANTIZATION_FILES.items():
        if (folder / file).is_file() and not raw.get("quantization_config"):
            raise UnsupportedModelError(
                f"model={name!r}: {file} says that its weights are quantized with {method}, which is not supported; "
                "give the folder of the unquantized model, or a GGUF file"
            )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # checks of configs raise errors of many kinds
        raise ConfigError(f"model={name!r}: its config.json is not allowed: {_told(error)}") from error
    return config.get_text_config() if config.model_type in TEXT_PARTS else config


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
