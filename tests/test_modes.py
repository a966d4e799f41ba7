"""PyTorch's modes of the thread that makes or uses an engine change nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import peft_adapters
from engines import OPTIONS
from gapless import LLM, SamplingParams
from models import tiny

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 4}
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13]}, {"prompt_token_ids": [3]}]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, top_k=30, min_p=0.01, seed=7, max_tokens=12, ignore_eos=True,
                       repetition_penalty=1.1, presence_penalty=0.2, logit_bias={3: 1.0})  # fmt: skip


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)  # type: ignore[arg-type]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "meta": lambda: torch.device("meta"),
    "set_default_device": lambda: default_device("meta"),
    "deterministic": deterministic,
}


def used(llm: LLM, other: dict[str, torch.Tensor], adapter: Path) -> list[Any]:
    """All that a thread may ask of an engine, and what came."""
    found: list[Any] = []

    def generate(**more: Any) -> None:
        for params in (GREEDY, DRAWN):
            for output in llm.generate(PROMPTS, params, use_tqdm=False, **more):
                (completion,) = output.outputs
                found.append((completion.token_ids, completion.logprobs))

    generate()
    llm.load_lora("one", adapter)
    generate(lora="one")
    llm.update_weights(other)
    generate()
    llm.sleep()
    llm.wake()
    generate(lora="one")
    return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, torch.Tensor], Path, list[Any]]:
    model, other = tiny("llama"), {k: v.clone() for k, v in tiny("llama", seed=5).state_dict().items()}
    folder = peft_adapters.save(model, peft_adapters.A, tmp_path_factory.mktemp("adapter"))
    with LLM(copy.deepcopy(model), **OPTIONS, **LORA) as llm:
        return model, other, folder, used(llm, other, folder)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("around", ["making", "using", "both"])
def test_a_mode_changes_nothing(mode: str, around: str, case: Any) -> None:
    model, other, folder, want = case
    mine = copy.deepcopy(model)
    with MODES[mode]() if around != "using" else contextlib.nullcontext():
        llm = LLM(mine, **{**OPTIONS, **LORA, "check_model": True})
    with llm, MODES[mode]() if around != "making" else contextlib.nullcontext():
        got = used(llm, other, folder)
    assert got == want


@pytest.mark.parametrize("mode", ["float64", "meta", "inference_mode", "autocast"])
def test_a_folder_loads_alike(mode: str, case: Any, tmp_path: Path) -> None:
    model, other, folder, _ = case
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, **OPTIONS, **LORA) as llm:
        want = used(llm, other, folder)
    with MODES[mode](), LLM(tmp_path, **OPTIONS, **LORA) as llm:
        assert used(llm, other, folder) == want


def test_a_model_that_was_made_in_inference_mode(case: Any) -> None:
    model, other, folder, want = case
    with torch.inference_mode():
        mine = copy.deepcopy(model)
        for name, parameter in list(mine.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(mine.get_submodule(owner), leaf, torch.nn.Parameter(parameter.clone(), requires_grad=False))
    assert next(mine.parameters()).is_inference()
    with LLM(mine, **OPTIONS, **LORA) as llm:
        assert used(llm, other, folder) == want


def test_the_callers_modes_are_as_before(case: Any) -> None:
    with torch.inference_mode(), default_dtype(torch.float64), torch.device("meta"):
        LLM(copy.deepcopy(case[0]), **OPTIONS).close()
        assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.float64
        assert torch.empty(1).is_meta
