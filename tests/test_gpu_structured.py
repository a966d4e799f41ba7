"""On a GPU: structured outputs parse, do not depend on depth or graphs, and leave their neighbours alone."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from engines import model, options
from gapless import LLM, SamplingParams

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
