"""EngineConfig: every option of the engine, checked once. Frozen; no torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gapless.errors import ConfigError, did_you_mean
from gapless.speculative_config import SpeculativeConfig

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
MAX_DEPTH = 64
"""Far beyond any use: two steps hide the host, and every further one has buffers of its own."""


DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""Other usual names."""
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(text: str) -> int:
    """Bytes of ``2G``, ``512MiB``, ``1.5g`` or a plain number; a K is 1024.

    Raises:
        ValueError: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is no size such as 2G or 512M")
    return int(float(found[1]) * _UNITS[found[2]]) if found[2] or "." in found[1] else int(found[1])


def _check(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r} is not allowed: {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine.

    Attributes:
        dtype: of weights and activations; ``bf16`` and ``fp16`` are taken too. ``auto`` takes the model's own (fp32 on
            a CPU).
        kv_cache_dtype: of keys and values in the cache. ``auto`` is that of the model; ``fp8_e4m3`` takes half the
            memory of bf16, so that twice as many tokens fit, and keeps four significant bits of each number. What else
            layers keep (inputs of convolutions, keys of indexers, states) stays as it is.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        pipeline_depth: steps in flight. 1 is synchronous; 2 hides the host behind the device; more absorb jitter.
        max_num_seqs: requests that run at once; each has a persistent row on the device.
        max_num_batched_tokens: token budget of one step; at least ``max_num_seqs``, so that no decode ever waits. A
            large one computes prompts quickest, a small one (256) keeps the time between tokens even while they come.
        max_model_len: longest prompt plus output, in tokens. None: what the model was made for.
        block_size: tokens in a block of the KV cache, a power of two.
        num_kv_blocks: blocks of the layers that keep every token; layers with a sliding window, which keep few, get
            what ``max_num_seqs`` rows need, and at most as many. In a model of windows alone, the blocks of each. None:
            from ``kv_cache_memory_bytes``, else from a share of the memory.
        kv_cache_memory_bytes: size of the KV cache, of all layers together: bytes, or a text such as ``2G``. None on a
            CPU: 1 GiB, or up to 4 for one request of the full length, and at most a quarter of what is available.
        gpu_memory_utilization: share of the device's memory that weights, graphs and cache may take together.
        enable_prefix_caching: reuse the blocks of equal prefixes.
        enforce_eager: no CUDA graphs.
        logprobs_mode: ``raw_logprobs``, of the model's own logits, or ``processed_logprobs``, after penalties, masks,
            temperature and filters.
        seed: with a request's number it seeds requests that bring no seed of their own.
        generation_config: use the sampling defaults of the model's ``generation_config.json`` (temperature, top-k,
            top-p, min-p, repetition penalty) where a request gives none.
        check_model: at load, run the parity probe against the model's own attention.
        allow_missing: tensors that the model's files, a draft model's or an adapter's may lack, by name or by a pattern
            with ``*``; without them such files are refused.
        ple_tables_on_host: tables of per-layer embeddings (n-grams) stay in host memory, and the GPU reads their rows
            from there.
        enable_lora: requests may run with LoRA adapters, which are loaded and unloaded while others run.
        max_loras: adapters that can be loaded at once; each has its place on the device. None: 4.
        max_lora_rank: largest rank of an adapter. Every place is as large as this rank needs. None: 16. Both are for
            ``enable_lora`` only, with which they are numbers.
        max_prompt_embeds: tokens of running requests that can be given by their embeddings (``prompt_embeds`` of a
            prompt) instead of ids; each has a place on the device. 0: none, and it costs nothing. For the library only.
        speculative: draft tokens ahead: a `SpeculativeConfig`, its fields as a mapping, or a text such as
            ``ngram,num_speculative_tokens=4`` or ``draft_model,model=FOLDER``. None: no drafts.
    """

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    pipeline_depth: int = 2
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    logprobs_mode: str = "raw_logprobs"
    seed: int = 0
    generation_config: bool = True
    check_model: bool = True
    allow_missing: str | Sequence[str] = ()
    ple_tables_on_host: bool = False
    enable_lora: bool = False
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_prompt_embeds: int = 0
    speculative: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        name = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", DTYPE_NAMES.get(name, name))
        if self.kv_cache_dtype == "fp8":
            object.__setattr__(self, "kv_cache_dtype", "fp8_e4m3")
        size: Any = self.kv_cache_memory_bytes
        if isinstance(size, str):
            with contextlib.suppress(ValueError):  # the check below names what is allowed
                object.__setattr__(self, "kv_cache_memory_bytes", parse_size(size))
        _check("dtype", self.dtype, self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        kept = self.kv_cache_dtype
        _check("kv_cache_dtype", kept, kept in KV_CACHE_DTYPES, f"one of {', '.join(KV_CACHE_DTYPES)}")
        device = self.device
        known = isinstance(device, str)
        known = known and (device in ("auto", "cpu", "cuda") or device.removeprefix("cuda:").isdigit())
        _check("device", device, known, "auto, cpu, cuda or cuda:N")
        for name in ("pipeline_depth", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            _check(name, value, _is_int(value) and value >= 1, "an integer >= 1")
        _check("pipeline_depth", self.pipeline_depth, self.pipeline_depth <= MAX_DEPTH, f"at most {MAX_DEPTH}")
        for name in ("max_model_len", "num_kv_blocks", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            _check(name, value, value is None or (_is_int(value) and value >= 2), "an integer >= 2, or None")
        size = self.block_size
        power = _is_int(size) and 8 <= size <= 256 and size & (size - 1) == 0
        _check("block_size", size, power, "a power of two from 8 to 256")
        share = self.gpu_memory_utilization
        number = isinstance(share, (int, float)) and not isinstance(share, bool)
        _check("gpu_memory_utilization", share, number and 0 < share <= 1, "a number in (0, 1]")
        switches = ("enable_prefix_caching", "enforce_eager", "generation_config", "check_model", "ple_tables_on_host")
        for name in (*switches, "enable_lora"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        for name, default, most in (("max_loras", 4, 256), ("max_lora_rank", 16, 512)):
            value = getattr(self, name)
            ok = value is None or (_is_int(value) and 1 <= value <= most)
            _check(name, value, ok, f"an integer from 1 to {most}, or None")
            if value is None and self.enable_lora:
                object.__setattr__(self, name, default)
        patterns = (self.allow_missing,) if isinstance(self.allow_missing, str) else self.allow_missing
        fine = isinstance(patterns, Sequence) and all(isinstance(name, str) and name for name in patterns)
        _check("allow_missing", self.allow_missing, fine, "a list of names of tensors, or of patterns")
        object.__setattr__(self, "allow_missing", tuple(patterns))
        modes = ("raw_logprobs", "processed_logprobs")
        _check("logprobs_mode", self.logprobs_mode, self.logprobs_mode in modes, f"one of {', '.join(modes)}")
        object.__setattr__(self, "speculative", SpeculativeConfig.of(self.speculative))
        embeds = self.max_prompt_embeds
        _check("max_prompt_embeds", embeds, _is_int(embeds) and embeds >= 0, "an integer >= 0")
        if embeds and self.speculative is not None:
            raise ConfigError(
                f"max_prompt_embeds={embeds} is not allowed together with speculative={self.speculative.method!r}: "
                "drafts are made of ids. Leave one of them out"
            )
        _check("seed", self.seed, _is_int(self.seed) and 0 <= self.seed < 2**63, "an integer in [0, 2**63)")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is smaller than max_num_seqs="
                f"{self.max_num_seqs}: a step must hold one token of every running request. Raise the first or "
                "lower the second"
            )

    @property
    def num_drafts(self) -> int:
        """Tokens that a row may draft in a step; 0 without drafts."""
        return 0 if self.speculative is None else self.speculative.num_speculative_tokens

    def refuse_without_effect(self) -> None:
        """Raise `ConfigError` for an option that would be without effect beside the others. Called when an engine is
        made: until then what gives it one may still be added, as the command does for adapters that it is given."""
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} and num_kv_blocks={self.num_kv_blocks} both say "
                "how large the KV cache is: leave one of them out"
            )
        for name in ("max_loras", "max_lora_rank"):
            if not self.enable_lora and (value := getattr(self, name)) is not None:
                raise ConfigError(
                    f"{name}={value!r} is not allowed without enable_lora=True: there are no adapters. Add that, or "
                    f"leave {name} out"
                )

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Options from plain data; an unknown name is an error that names the nearest known one."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ConfigError(f"unknown engine option {name!r}.{hint} Known: {', '.join(known)}")
        return cls(**options)
