"""On a GPU: structured outputs parse, do not depend on depth or graphs, and leave their neighbours alone."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import torch

from engines import model, options, tokenizer
from gapless import LLM, AsyncLLM, SamplingParams
from models import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{0,6}$"}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any] | None] = [
    None,
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": "[0-9]{3}-[a-z]{5}"},
    None,
    {"choice": ["yes", "no"]},
]


def run(**changes: Any) -> list[tuple[str, list[int]]]:
    common: dict[str, Any] = {"max_tokens": 60}
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, logprobs=i % 3 or None, structured_outputs=form, **common)
        for i, form in enumerate(FORMS * 3)
    ]
    with LLM(**options(model=model().cuda(), device="cuda", max_num_seqs=6, **changes)) as llm:
        outputs = llm.generate([f"hello {i}" for i in range(len(params))], params, use_tqdm=False)
        stats, _ = llm.stats()
        assert stats.held_steps > 0
        return [(o.outputs[0].text, o.outputs[0].token_ids) for o in outputs]


def test_outputs_parse_and_do_not_depend_on_depth_or_graphs() -> None:
    pytest.importorskip("llguidance")
    truth = run(pipeline_depth=1, enforce_eager=True)
    for (text, _), form in zip(truth, FORMS * 3, strict=True):
        if form is not None and "json" in form:
            assert set(json.loads(text)) == {"name", "age"}
        elif form is not None:
            assert re.fullmatch(form.get("regex", "yes|no"), text)
    for depth in (1, 2, 3):
        assert run(pipeline_depth=depth) == truth


def test_a_wake_leaves_the_masks_of_rows_alone() -> None:
    """A slot still holds the mask of its last held step, whose row another request has by now, with its own mask."""
    pytest.importorskip("llguidance")
    new, allowed = 1500, [5, 9, 77, 90]
    longer = tiny("llama", vocab_size=len(tokenizer()), num_hidden_layers=2, max_position_embeddings=2048)
    choice = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, max_tokens=10)
    second = SamplingParams(temperature=0.8, seed=3, max_tokens=new, ignore_eos=True, allowed_token_ids=allowed)
    sizes = {"max_num_seqs": 1, "max_model_len": 2048, "num_kv_blocks": 512, "pipeline_depth": 1}

    async def tokens(sleeps: bool) -> list[int]:
        async with AsyncLLM(**options(model=longer.cuda(), device="cuda", **sizes)) as llm:
            outputs = [output async for output in llm.generate("hello", choice, "first")]
            stream = llm.generate("hello", second, "second")
            outputs.append(await anext(stream))
            if sleeps:
                await llm.pause()
                await llm.sleep()
                await llm.wake()
                await llm.resume()
                assert len(outputs[-1].outputs[0].token_ids) < new  # it slept in the middle of the request
            outputs += [output async for output in stream]
            return outputs[-1].outputs[0].token_ids

    got = asyncio.run(tokens(sleeps=True))
    assert len(got) == new
    assert set(got) <= set(allowed)
    assert got == asyncio.run(tokens(sleeps=False))
