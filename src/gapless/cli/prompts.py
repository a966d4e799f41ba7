"""Prompts from arguments, files and standard input, checked line by line before anything heavy starts.

A text file has one prompt a line. A JSONL file has one object a line: ``prompt``, ``prompt_token_ids`` or
``messages``, perhaps ``lora``, and any field of `SamplingParams`, which counts for that line instead of the command's
options.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gapless.cli.adapters import adapter_of
from gapless.cli.options import LEFT_OUT
from gapless.cli.parser import UsageError
from gapless.errors import RequestError, did_you_mean
from gapless.request.sampling_params import SamplingParams
from gapless.text.chat import check_messages

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
_PARAMETERS = tuple(f.name for f in fields(SamplingParams) if ("SamplingParams", f.name) not in LEFT_OUT)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt. Either ``prompt`` (a text, or a dict with ids) or ``messages`` is set.

    Attributes:
        lora: the adapter that the prompt asks for; None for the model alone.
        where: what an error message calls it, such as ``prompts.jsonl:3``.
    """

    where: str
    params: SamplingParams
    prompt: str | dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    lora: str | None = None

    @property
    def title(self) -> str:
        """The prompt in a few words."""
        if self.messages is not None:
            text = str(self.messages[-1].get("content", ""))
        else:
            text = self.prompt if isinstance(self.prompt, str) else str(self.prompt)
        text = " ".join(text.split())
        return text if len(text) <= 80 else text[:77] + "..."


def jobs_from_arguments(
    texts: Sequence[str], parameters: Mapping[str, Any], chat: bool, loras: Sequence[str] = ()
) -> list[Job]:
    """One job for each text; see `jobs_from_file` for ``loras``."""
    params, lora = SamplingParams.from_dict(parameters), adapter_of(loras, {})
    return [_text_job(f"prompt {i}", text, params, chat, lora) for i, text in enumerate(texts, 1)]


def jobs_from_file(
    path: str, jsonl: bool | None, parameters: Mapping[str, Any], chat: bool, loras: Sequence[str] = ()
) -> list[Job]:
    """One job for each line that is not blank.

    Args:
        path: of the file, or ``-`` for standard input.
        jsonl: None looks at the file's name.
        parameters: fields of `SamplingParams` for every line.
        chat: each text is a user's message.
        loras: names of the adapters that will be loaded; see `adapter_of`.

    Raises:
        UsageError: the file cannot be read, or lines of it are wrong: the first of them is named.
    """
    if jsonl is None:
        jsonl = Path(path).suffix in (".jsonl", ".ndjson")
    base = SamplingParams.from_dict(parameters)
    name = "standard input" if path == "-" else path
    jobs, errors = list[Job](), list[str]()
    # Not splitlines(): JSON texts may hold U+2028 as they are.
    for number, line in enumerate(_read(path, name).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            if jsonl:
                jobs.append(_json_job(where, line, parameters, chat, loras))
            else:
                jobs.append(_text_job(where, line, base, chat, adapter_of(loras, {})))
        except (UsageError, RequestError) as error:
            errors.append(f"{where}: {error}")
    if errors:
        more = f" (and {len(errors) - 1} more wrong lines)" if len(errors) > 1 else ""
        raise UsageError(errors[0] + more)
    if not jobs:
        raise UsageError(f"{name} holds no prompt")
    return jobs


def _read(path: str, name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{name}:{line}: not UTF-8: byte {data[error.start]:#04x}") from error
    return text.replace("\r\n", "\n")


def _text_job(where: str, text: str, params: SamplingParams, chat: bool, lora: str | None) -> Job:
    if chat:
        return Job(where, params, messages=[{"role": "user", "content": text}], lora=lora)
    return Job(where, params, prompt=text, lora=lora)


def _json_job(where: str, line: str, parameters: Mapping[str, Any], chat: bool, loras: Sequence[str]) -> Job:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise UsageError(f'a JSON object is needed, such as {{"prompt": "Hello"}}, not {line.strip()[:40]!r}')
    known = (*PROMPT_KEYS, "lora", *_PARAMETERS)
    for key in record:
        if key not in known:
            raise UsageError(f"unknown key {key!r}.{did_you_mean(key, known)} Known: {', '.join(known)}")
    kinds = [key for key in PROMPT_KEYS if key in record]
    if len(kinds) != 1:
        has = " and ".join(kinds) or "none"
        raise UsageError(f"a line needs exactly one of {', '.join(PROMPT_KEYS)}; it has {has}")
    params = SamplingParams.from_dict({**parameters, **{k: v for k, v in record.items() if k in _PARAMETERS}})
    value, lora = record[kinds[0]], adapter_of(loras, record)
    if kinds[0] == "messages":
        return Job(where, params, messages=check_messages(value), lora=lora)
    if kinds[0] == "prompt":
        if not isinstance(value, str):
            raise UsageError(f"prompt={value!r} is not allowed: a text")
        return _text_job(where, value, params, chat, lora)
    if chat:
        raise UsageError("prompt_token_ids cannot go through a chat template: drop --chat, or give messages")
    return Job(where, params, prompt={"prompt_token_ids": value}, lora=lora)
