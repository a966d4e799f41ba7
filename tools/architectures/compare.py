"""One architecture through the whole engine, against the model's own attention.

Three prompts of different lengths run in one batch, in chunks, greedily, for some tokens. Then the model itself,
without a cache, computes each prompt with the tokens that came out, in one forward. Each token must be its most likely
one, and the log-probabilities of the most likely tokens must be the same. All in fp32.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from architectures.small import NotSmall, class_name, default_config, small_config, small_model, told
from gapless.errors import UnsupportedModelError
from gapless.llm import LLM
from gapless.model.config_checks import check_config
from gapless.request.sampling_params import SamplingParams

LENGTHS = (23, 1, 9)
NEW_TOKENS = 14
TOP = 5
TOLERANCE = 1e-3
"""Of a log-probability. Rounding gives 1e-6 to 1e-5; a wrong mask or position gives 0.1 and more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one ``model_type``.

    Attributes:
        result: ``equal``; ``differs`` or ``fails``, which would be faults of the engine; ``refused`` by name;
            ``not small`` or ``no end``, which say nothing.
        text: a bound of the largest difference, or the reason.
        windows: of the engine's groups of layers; see `gapless.cache.groups`.
    """

    model_type: str
    result: str
    text: str
    windows: tuple[int | None, ...] = ()


def outcome(model_type: str, device: str = "cpu") -> Outcome:
    """Try the architecture; never raises for what the model does."""
    name = class_name(model_type)
    try:
        check_config(default_config(model_type))
        config = small_config(model_type)
        check_config(config)
        difference, windows = _compare(small_model(config).to(device), device)
    except NotSmall as error:
        return Outcome(model_type, "not small", str(error))
    except UnsupportedModelError as error:
        return Outcome(model_type, "refused", _reason(str(error), model_type, name))
    except Exception as error:
        return Outcome(model_type, "fails", told(error))
    if difference > TOLERANCE:
        return Outcome(model_type, "differs", f"by {difference:.1g}", windows)
    return Outcome(model_type, "equal", _bound(difference), windows)


def _compare(model: Any, device: str) -> tuple[float, tuple[int | None, ...]]:
    vocab = int(model.config.vocab_size)
    rng = random.Random(5)
    prompts = [[rng.randrange(2, vocab) for _ in range(n)] for n in LENGTHS]
    try:  # what the model itself cannot do says nothing about the engine
        with torch.no_grad():
            model(input_ids=torch.tensor([prompts[0]], device=device), use_cache=False)
    except Exception as error:
        raise NotSmall(f"its own forward fails: {told(error)}") from error
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=TOP)
    options: dict[str, Any] = {
        "device": device, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 8,
        "num_kv_blocks": 33,
    }  # fmt: skip
    with LLM(model, tokenizer=None, **options) as llm:
        windows = llm._client._built.layout.windows
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        (made,) = output.outputs
        tokens, found = list(made.token_ids), made.logprobs
        assert found is not None
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].cpu()
        own = torch.log_softmax(logits.double(), -1)
        if len(own) != len(tokens):
            return float("inf"), windows
        for row, token, records in zip(own, tokens, found, strict=True):
            worst = max(worst, float(row.max() - row[token]))
            for other, record in records.items():
                worst = max(worst, abs(float(row[other]) - record.logprob))
    return worst, windows


def _bound(difference: float) -> str:
    power = -6
    while 10.0**power < difference:
        power += 1
    return f"below 1e{power}"


def _reason(message: str, *names: str) -> str:
    """The message without the names that begin it."""
    for name in names:
        message = message.removeprefix(f"{name}: ").removeprefix(f"{name}, ")
    return " ".join(message.replace("`", "'").split()).rstrip(".")
