"""Workloads from files: prompts, one a line, or conversations in the form of ShareGPT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gapless.bench.workloads import Workload
from gapless.cli.prompts import all_jobs
from gapless.errors import InputError
from gapless.text.chat import encode_prompt

SHORTEST, LONGEST = 4, 1024
"""Tokens of a ShareGPT prompt and of its answer: outside of it a conversation is left out, as is usual."""


def from_prompts(path: str, tokenizer: Any, vocab_size: int, output_len: int) -> Workload:
    """Texts, one a line, or JSONL as ``gapless generate --file`` takes it; ``max_tokens`` of a line counts.

    Raises:
        InputError, RequestError: naming the line.
    """
    jobs = all_jobs(path, None, {"max_tokens": output_len}, chat=False)
    ids = []
    for job in jobs:
        if job.messages is not None:
            raise InputError(f"{job.where}: messages are not for benchmarks: give prompt or prompt_token_ids")
        ids.append(tuple(int(i) for i in encode_prompt(job.prompt, tokenizer, vocab_size).token_ids))
    outputs = tuple(job.params.max_tokens or output_len for job in jobs)
    return Workload(Path(path).stem, tuple(map(len, ids)), outputs, fixed_prompts=tuple(ids))


def from_sharegpt(path: str, tokenizer: Any, limit: int, output_len: int | None) -> Workload:
    """First question and answer of each conversation: the prompt, and how many tokens to generate.

    Args:
        limit: use that many conversations, in the file's order.
        output_len: instead of the answers' lengths.

    Raises:
        InputError: the file is not of that form, there is no tokenizer, or no conversation fits.
    """
    if tokenizer is None:
        raise InputError("--sharegpt needs a model with a tokenizer: give --model")
    prompts, outputs = [], []
    for question, answer in turns(path):
        ids, reply = (tokenizer.encode(text, add_special_tokens=False) for text in (question, answer))
        if not (SHORTEST <= len(ids) <= LONGEST and SHORTEST <= len(reply) <= LONGEST):
            continue
        prompts.append(tuple(ids))
        outputs.append(output_len or len(reply))
        if len(prompts) == limit:
            break
    if not prompts:
        raise InputError(f"{path}: no conversation has {SHORTEST} to {LONGEST} tokens in question and answer")
    return Workload(Path(path).stem, tuple(map(len, prompts)), tuple(outputs), fixed_prompts=tuple(prompts))


def turns(path: str) -> Iterator[tuple[str, str]]:
    """First two texts of each conversation of a file in the form of ShareGPT.

    Raises:
        InputError: the file is not of that form.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, list):
        raise InputError(f"{path}: a list of conversations is needed")
    for i, item in enumerate(data):
        turns = item.get("conversations", item.get("conversation")) if isinstance(item, dict) else None
        if not isinstance(turns, list):
            raise InputError(f'{path}: item {i} has no list "conversations"')
        texts = [str(t["value"]) for t in turns if isinstance(t, dict) and "value" in t]
        if len(texts) >= 2:
            yield texts[0], texts[1]
