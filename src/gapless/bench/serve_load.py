"""What a load test of a server sends, and when: prompts by data set, arrivals by rate."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless.bench.files import LONGEST, SHORTEST, turns
from gapless.errors import InputError

_COMMON = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into them
can only other time new some could these two may first then do any like my now over such our man me
"""
WORDS = tuple(_COMMON.split())
"""Each is one token, with the space before it, in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        prompt: a text, or token ids.
        prompt_len: tokens of it, as far as they are known without the server.
        output_len: tokens to generate.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int


def arrivals(count: int, rate: float, burstiness: float, constant: bool, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent.

    The gaps follow a gamma distribution of shape ``burstiness``: 1 are independent callers (a Poisson process), less
    come in bursts, more are evener. They are scaled so that the whole takes ``count / rate`` seconds, which makes runs
    of few requests comparable.

    Args:
        rate: requests a second; infinite for all at once.
        constant: equal gaps instead.
    """
    if math.isinf(rate):
        return [0.0] * count
    if constant:
        return [i / rate for i in range(count)]
    rng = random.Random(seed)
    gaps = [rng.gammavariate(burstiness, 1.0 / burstiness) for _ in range(count)]
    scale = count / rate / (sum(gaps) or 1.0)
    return [0.0, *itertools.accumulate(gap * scale for gap in gaps[:-1])] if count else []


def random_asks(
    count: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    vocab: int = 10_000,
    texts: bool = False,
    tokenizer: Any = None,
    seed: int = 0,
) -> list[Ask]:
    """Prompts that no cache knows, all after one shared prefix.

    Args:
        input_len, output_len: tokens; drawn between ``1 - range_ratio`` and ``1 + range_ratio`` times that.
        prefix_len: tokens that all prompts share, before theirs.
        vocab: ids are below it.
        texts: send text; of the tokenizer's tokens, or of words that are a token each in most vocabularies.
    """
    rng = random.Random(seed)

    def length(middle: int) -> int:
        low, high = math.floor(middle * (1 - range_ratio)), math.ceil(middle * (1 + range_ratio))
        return rng.randint(max(low, 1), max(high, 1))

    def draw(size: int) -> list[int]:
        return [rng.randrange(len(WORDS) if words else vocab) for _ in range(size)]

    words = texts and tokenizer is None
    prefix, asks = draw(prefix_len), []
    for _ in range(count):
        size, new = length(input_len), length(output_len)
        ids = prefix + draw(size)
        prompt: str | list[int] = ids
        if words:
            prompt = " ".join(WORDS[i] for i in ids)
        elif texts:
            prompt = _text(ids, tokenizer)
        asks.append(Ask(prompt, len(ids), new))
    return asks


def _text(ids: list[int], tokenizer: Any) -> str:
    """A text of about as many tokens: what ids decode to is cut to their number after it is encoded again."""
    again = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
    text: str = tokenizer.decode(again[: len(ids)])
    return text


def sharegpt_asks(path: str, count: int, tokenizer: Any, output_len: int | None, seed: int) -> list[Ask]:
    """First question and answer of conversations, shuffled; as many as were asked for, from the start again if there
    are too few.

    Args:
        tokenizer: counts tokens, so that very short and very long ones are left out; None takes all.
        output_len: instead of the answers' lengths.

    Raises:
        InputError: the file is not of that form, or there is nothing to learn the lengths from.
    """
    if tokenizer is None and output_len is None:
        raise InputError("the answers' lengths are counted in tokens: give --tokenizer, or --output-len")
    found = []
    for question, answer in turns(path):
        if tokenizer is None:
            found.append(Ask(question, len(question.split()), output_len or 1))
            continue
        size, reply = (len(tokenizer.encode(text, add_special_tokens=False)) for text in (question, answer))
        if SHORTEST <= size <= LONGEST and (output_len or reply) >= SHORTEST and size + reply <= 2 * LONGEST:
            found.append(Ask(question, size, output_len or reply))
    if not found:
        raise InputError(f"{path}: no conversation has a usable length")
    random.Random(seed).shuffle(found)
    return [found[i % len(found)] for i in range(count)]


def prompts_file_asks(path: str, count: int | None, tokenizer: Any, output_len: int) -> list[Ask]:
    """Texts, one a line, or JSONL with ``prompt`` (and ``output_tokens`` or ``max_tokens``) in each line.

    Args:
        count: that many, from the start again if there are too few; None for the file's own number.

    Raises:
        InputError: naming the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text, new = line, output_len
        if path.endswith(".jsonl"):
            try:
                item = json.loads(line)
                text = item["prompt"]
                new = int(item.get("output_tokens", item.get("max_tokens", output_len)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f'{path}:{number}: an object with "prompt" is needed ({error!r})') from error
            if not isinstance(text, str) or not text or new < 1:
                raise InputError(f"{path}:{number}: prompt must be a text, and max_tokens an integer >= 1")
        size = len(text.split()) if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False))
        found.append(Ask(text, size, new))
    if not found:
        raise InputError(f"{path}: there is no prompt in it")
    return [found[i % len(found)] for i in range(count or len(found))]
