"""From options to an engine, over a worker in this process: load the model, open its runner. Runs once, at start."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gapless.batch.row_layout import RowLayout
from gapless.cache.groups import group_windows, kv_groups
from gapless.cache.spec import KVSpec, LayerSpec, StateSpec, kept_as
from gapless.config import EngineConfig
from gapless.device.base import Device
from gapless.device.cpu import CpuDevice
from gapless.device.modes import plain_modes
from gapless.engine.assemble import GIB, Built, Progress, assemble
from gapless.errors import ConfigError, UnsupportedModelError
from gapless.grammar.compiler import available
from gapless.lora.bank import AdapterBank
from gapless.model.base import CausalModel
from gapless.model.weights import Weights
from gapless.request.messages import StepMessage
from gapless.runner.kernels import reference_kernels, triton_kernels
from gapless.runner.runner import Runner
from gapless.runner.shapes import EXACT, graph_shapes
from gapless.scheduler.step_builder import max_updates
from gapless.speculative.base import Speculation
from gapless.speculative.make import make_speculation

logger = logging.getLogger("gapless")



def resolve_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: no CUDA device was found. Use device='cpu', or a CUDA build of torch")
    device = torch.device(name)
    if device.type == "cuda":
        index, count = device.index or 0, torch.cuda.device_count()
        if index >= count:
            raise ConfigError(f"device={name!r}: this machine has the CUDA devices 0 to {count - 1}")
        device = torch.device("cuda", index)
    return device


def build(
    model: str | Path | Any,
    config: EngineConfig,
    publish: Callable[[StepMessage], None],
    on_death: Callable[[BaseException], None],
    *,
    check: bool = False,
    progress: Progress = iter,
) -> Built:
    """Everything up to, but not including, `Engine.start`.

    Args:
        model: a folder, a name, a GGUF file, a ``transformers`` model, or a `CausalModel`.
        config: of the engine.
        publish, on_death, check: see `Engine`.
        progress: wraps the list of graphs to capture, as tqdm does.

    Raises:
        ConfigError: an option does not fit this machine or model, or the memory does not suffice.
        UnsupportedModelError: the engine would compute this model wrongly.
    """
    config.refuse_without_effect()
    device = resolve_device(config.device)
    if config.device == "auto" and isinstance(own := getattr(model, "device", None), torch.device):
        device = own  # a model object runs where it lies
    if device.type == "cuda":
        from gapless.device.cuda import EXCLUSIVE, no_collection

        gc.collect()
        with EXCLUSIVE, plain_modes(), torch.cuda.device(device), no_collection():
            try:
                worker = LocalWorker(model, config, device)
                return assemble(worker, publish, on_death, check=check, progress=progress)
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise ConfigError(
                    f"out of memory on {device}: {_first_line(error)} Lower num_kv_blocks or kv_cache_memory_bytes if "
                    "you set them, else gpu_memory_utilization, max_num_seqs or max_num_batched_tokens; or the model "
                    "itself is too large for this device"
                ) from error
    with plain_modes():
        return assemble(LocalWorker(model, config, device), publish, on_death, check=check, progress=progress)


class LocalWorker:
    """A `gapless.engine.assemble.Worker` in this process: the model is loaded and checked.

    Args:
        source, config: see `build`.
        device: where the model goes, or lies.
    """

    def __init__(self, source: str | Path | Any, config: EngineConfig, device: torch.device) -> None:
        start = time.perf_counter()
        model, self._weights = _model(source, config, device)
        self.model, self._device, self.on_gpu = model, device, device.type == "cuda"
        logger.info(
            "%s: %.2f GiB of weights in %s, ready in %.1f s on %s",
            model.name, model.weight_bytes / GIB, str(model.dtype).removeprefix("torch."),
            time.perf_counter() - start, device,
        )  # fmt: skip
        longest = model.max_position if config.max_model_len is None else config.max_model_len
        if longest > model.max_position:
            raise ConfigError(
                f"max_model_len={longest} is more than the {model.max_position} positions of {model.name}"
            )
        config = dataclasses.replace(config, max_model_len=longest)
        self._draft_model = _draft_model(config, model, device)
        _check_states(model, config.num_drafts)
        drafts = () if self._draft_model is None else self._draft_model.kv_specs
        self.specs: tuple[LayerSpec, ...] = (*model.kv_specs, *drafts)
        windows = group_windows(self.specs, longest)
        self.groups = kv_groups(self.specs, windows)
        self.layout = RowLayout(
            config.max_num_seqs, longest + config.num_drafts, config.block_size, model.vocab_size, windows
        )
        if config.enable_prefix_caching and not all(spec.paged for spec in model.kv_specs):
            logger.info("prefix caching is off: %s has layers whose state cannot be cut at a position", model.name)
            config = dataclasses.replace(config, enable_prefix_caching=False)
        if self.layout.num_words >= 2**31:
            raise ConfigError(
                f"max_num_seqs={config.max_num_seqs} rows of max_model_len={longest} tokens need more than 2**31 words "
                "of row state. Lower one of them"
            )
        self.config = config
        self._bank = _adapters(model, config, device) if config.enable_lora else None
        self.embeds_width = _embeds_width(model, config) if config.max_prompt_embeds else 0

    def open(self, num_blocks: int | tuple[int, ...]) -> Runner:
        """A runner on a device of its own."""
        config, chosen = self.config, self._open_device()
        try:
            if self.on_gpu:
                shapes = graph_shapes(
                    config.max_num_seqs, config.max_num_batched_tokens, capture=not config.enforce_eager
                )
                kernels = triton_kernels()
            else:
                shapes, kernels = EXACT, reference_kernels()
            speculation: Speculation | None = None
            if config.speculative is not None:
                speculation = make_speculation(
                    config.speculative, kernels.sample, on_gpu=self.on_gpu, draft_model=self._draft_model
                )
            return Runner(
                chosen,
                self.model,
                self.layout,
                num_blocks=num_blocks,
                depth=config.pipeline_depth,
                max_num_tokens=config.max_num_batched_tokens,
                max_updates=max_updates(config, self.layout),
                kernels=kernels,
                shapes=shapes,
                processed_logprobs=config.logprobs_mode == "processed_logprobs",
                masks=available(),
                adapters=self._bank,
                speculation=speculation,
                embeds=(config.max_prompt_embeds, self.embeds_width),
                weights=self._weights,
            )
        except BaseException as error:
            chosen.close()  # or its threads would stay
            if isinstance(error, torch.OutOfMemoryError):
                raise MemoryError(str(error)) from error
            if isinstance(error, (RuntimeError, MemoryError, OSError)):
                raise ConfigError(
                    f"the buffers for num_kv_blocks={num_blocks}, max_num_seqs={config.max_num_seqs} and "
                    f"max_num_batched_tokens={config.max_num_batched_tokens} cannot be had: {_first_line(error)} "
                    "Lower the one that is too large"
                ) from error
            raise

    def _open_device(self) -> Device:
        if not self.on_gpu:
            return CpuDevice()
        from gapless.device.cuda import CudaDevice

        return CudaDevice(self._device.index)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _model(source: Any, config: EngineConfig, device: torch.device) -> tuple[CausalModel, Weights | None]:
    """Loaded and compared with its own arithmetic; only then its cache takes the asked-for format, which rounds."""
    model, weights = _load(source, config, device)
    if config.kv_cache_dtype != "auto":
        model.kv_specs = _kept_as(model, config.kv_cache_dtype, device, given=model is source)
    return model, weights


def _kept_as(model: CausalModel, kv_format: str, device: torch.device, *, given: bool) -> tuple[LayerSpec, ...]:
    name = f"kv_cache_dtype={kv_format!r}"
    if given:
        raise ConfigError(f"{name}: {model.name} was given with kv_specs of its own, which say how its cache is kept")
    if not any(isinstance(spec, KVSpec) for spec in model.kv_specs):
        raise ConfigError(f"{name}: {model.name} has no layer that keeps keys and values. Leave it out")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(
            f"{name}: {torch.cuda.get_device_name(device)} cannot convert this format, as GPUs from compute "
            "capability 8.9 can. Leave it out"
        )
    return kept_as(model.kv_specs, kv_format)


def _load(source: Any, config: EngineConfig, device: torch.device) -> tuple[CausalModel, Weights | None]:
    if hasattr(source, "kv_specs"):
        ready: CausalModel = source
        return ready, None
    theirs = source if isinstance(source, torch.nn.Module) else None
    from gapless.model.load.loading import load_model

    options: dict[str, Any] = {
        "dtype": config.dtype,
        "device": device,
        "max_model_len": config.max_model_len,
        "probe": config.check_model,
        "ple_tables_on_host": config.ple_tables_on_host,
        "num_drafts": config.num_drafts,
        "allow_missing": config.allow_missing,
    }
    if device.type != "cuda":
        loaded = load_model(source, **options)
        return loaded.model, Weights(loaded.model.module, theirs)
    from gapless.attention import triton as attention
    from gapless.model.describe import Unknown, describe
    from gapless.model.ops import triton as ops_triton
    from gapless.model.probe import probe_parity
    from gapless.model.run.model import DecoderModel

    plain = load_model(source, attention=attention.attend, **options).model
    try:
        decoder = describe(plain, config.max_model_len or plain.max_position)
        fused = DecoderModel(plain, decoder, ops_triton, attention.attend_cached)
        small = fused.enable_small_batches()
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:  # where it was measured
            fused.enable_gated()
        if config.check_model:
            probe_parity(plain, fast=fused)
    except (Unknown, UnsupportedModelError) as error:
        logger.warning("%s runs unfused: %s", plain.name, error)
        return plain, Weights(plain.module, theirs)
    for part, kernels in fused.summary():
        logger.info("fused: %-34s %s", part, kernels)
    if not small:
        logger.info("fused: decode of few tokens runs as other steps do: its kernels are for bf16")
    return fused, Weights(plain.module, theirs)


def _embeds_width(model: CausalModel, config: EngineConfig) -> int:
    """Of the embeddings that prompts may bring for tokens of ``model``."""
    enable = getattr(model, "enable_prompt_embeds", None)
    if enable is None:
        raise ConfigError(
            f"max_prompt_embeds={config.max_prompt_embeds}: {model.name} ({type(model).__name__}) takes ids only"
        )
    width: int = enable()
    logger.info(
        "embeddings: %d tokens of running requests can be given so, %.3f GiB",
        config.max_prompt_embeds, config.max_prompt_embeds * width * model.dtype.itemsize / GIB,
    )  # fmt: skip
    return width


def _adapters(model: CausalModel, config: EngineConfig, device: torch.device) -> AdapterBank:
    """Room for the adapters of ``model``; nothing is allocated yet."""
    enable = getattr(model, "enable_lora", None)
    if enable is None:
        raise ConfigError(f"enable_lora=True: {model.name} ({type(model).__name__}) cannot have adapters")
    ops = importlib.import_module("gapless.lora.triton" if device.type == "cuda" else "gapless.lora.reference")
    assert config.max_loras is not None
    assert config.max_lora_rank is not None
    bank: AdapterBank = enable(slots=config.max_loras, rank=config.max_lora_rank, ops=ops)
    if not bank.sites:
        raise ConfigError(f"enable_lora=True: {model.name} has no linear layer that could have an adapter")
    logger.info(
        "LoRA: %d adapters of rank %d, %.3f GiB each, for %s",
        bank.slots, bank.rank, bank.words * model.dtype.itemsize / GIB, ", ".join(bank.targets()),
    )  # fmt: skip
    return bank


def _draft_model(config: EngineConfig, model: CausalModel, device: torch.device) -> CausalModel | None:
    """The second model of ``speculative``, if it has one; both must be such that a rejected draft leaves no trace."""
    if config.speculative is None or config.speculative.model is None:
        return None
    draft, _ = _model(config.speculative.model, config, device)
    logger.info("drafts: %s, %.2f GiB of weights", draft.name, draft.weight_bytes / GIB)
    odd = sorted({spec.kind.value for spec in draft.kv_specs if not isinstance(spec, KVSpec)})
    if odd:
        raise ConfigError(
            f"speculative.model={draft.name} keeps {', '.join(odd)}: only decoders with attention in all layers can "
            "draft. Use another draft model, or method=ngram"
        )
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative.model={draft.name} has a vocabulary of {draft.vocab_size} tokens, and {model.name} one of "
            f"{model.vocab_size}: drafts are ids of the target. Use a draft model with the target's tokenizer"
        )
    if draft.max_position < (config.max_model_len or 0):
        raise ConfigError(
            f"speculative.model={draft.name} was made for {draft.max_position} positions, fewer than max_model_len="
            f"{config.max_model_len}. Lower max_model_len, or use another draft model"
        )
    return draft


def _check_states(model: CausalModel, num_drafts: int) -> None:
    """A row can go back as many tokens as it has states besides the newest."""
    slots = min((spec.slots for spec in model.kv_specs if isinstance(spec, StateSpec)), default=num_drafts + 1)
    if slots <= num_drafts:
        raise ConfigError(
            f"speculative.num_speculative_tokens={num_drafts}: {model.name} was made with states for {slots - 1} "
            "tokens that may be taken back. Make it with num_drafts as large, or hand in the transformers model"
        )
