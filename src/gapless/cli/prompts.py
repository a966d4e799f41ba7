"""Prompts from arguments, files and standard input, read as they are needed and checked line by line.

A text file has one prompt a line. A JSONL file has one object a line: ``prompt``, ``prompt_token_ids`` or
``messages``, perhaps ``id`` or ``custom_id``, which its result repeats, ``lora``, and any field of `SamplingParams`,
which counts for that line instead of the command's options. Lines of OpenAI's batch files are known by their ``body``.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from gapless.cli.adapters import adapter_of
from gapless.cli.openai_form import BatchLine
from gapless.cli.options import LEFT_OUT
from gapless.cli.parser import UsageError
from gapless.errors import RequestError, did_you_mean
from gapless.request.sampling_params import SamplingParams
from gapless.text.chat import check_messages

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
ID_KEYS = ("id", "custom_id")
FIRST = 1000
"""Lines of a file that are checked before a model is loaded: a wrong one of them refuses the whole."""
_PARAMETERS = tuple(f.name for f in fields(SamplingParams) if ("SamplingParams", f.name) not in LEFT_OUT)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt. One of ``prompt`` (a text, or a dict with ids), ``messages`` and ``error`` is set.

    Attributes:
        lora: the adapter that the prompt asks for; None for the model alone.
        where: what an error message calls it, such as ``prompts.jsonl:3``.
        index: which prompt of its source it is, from 0.
        id: the key and the value by which its line is known, such as ``("custom_id", "a7")``.
        batch: what the answer to a line of OpenAI's batch file needs of it.
        error: why the line is none that can be answered.
        given: fields of ``params`` that the user gave.
    """

    where: str
    params: SamplingParams
    prompt: str | dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    lora: str | None = None
    index: int = 0
    id: tuple[str, str | int] | None = None
    batch: BatchLine | None = None
    error: str | None = None
    given: frozenset[str] = frozenset()

    def with_defaults(self, defaults: Mapping[str, float]) -> Job:
        """With the model's own ``defaults`` where the user gave nothing."""
        missing: dict[str, Any] = {name: value for name, value in defaults.items() if name not in self.given}
        return replace(self, params=replace(self.params, **missing)) if missing else self

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
    """One job for each text; see `read_jobs` for ``loras``."""
    params, lora = SamplingParams.from_dict(parameters), adapter_of(loras, {})
    jobs = [_text_job(f"prompt {i}", text, params, chat, lora) for i, text in enumerate(texts, 1)]
    return [replace(job, index=i, given=frozenset(parameters)) for i, job in enumerate(jobs)]


def read_jobs(
    path: str, jsonl: bool | None, parameters: Mapping[str, Any], chat: bool, loras: Sequence[str] = ()
) -> Iterator[Job]:
    """One job for each line that is not blank, read when it is asked for. A wrong line is a job with an ``error``.

    Args:
        path: of the file, or ``-`` for standard input.
        jsonl: None looks at the file's name.
        parameters: fields of `SamplingParams` for every line.
        chat: each text is a user's message.
        loras: names of the adapters that will be loaded; see `adapter_of`.

    Raises:
        UsageError: the file cannot be read.
    """
    if jsonl is None:
        jsonl = Path(path).suffix in (".jsonl", ".ndjson")
    base = SamplingParams.from_dict(parameters)
    name = "standard input" if path == "-" else path
    index = 0
    for number, raw in enumerate(_lines(path, name), 1):
        if not raw.strip():
            continue
        where = f"{name}:{number}"
        try:
            line = raw.decode()
            if jsonl:
                job = _json_job(where, line, parameters, chat, loras)
            else:
                job = _text_job(where, line, base, chat, adapter_of(loras, {}))
        except UnicodeDecodeError as error:
            job = Job(where, base, error=f"not UTF-8: byte {raw[error.start]:#04x}")
        except (UsageError, RequestError) as error:
            job = Job(where, base, error=str(error), **_identity(raw))
        yield replace(job, index=index, given=job.given | frozenset(parameters))
        index += 1
    if not index:
        raise UsageError(f"{name} holds no prompt")


def first_checked(jobs: Iterator[Job]) -> Iterator[Job]:
    """The same jobs, of which the first `FIRST` are read now.

    Raises:
        UsageError: some of these are wrong: the first of them is named.
    """
    first = list(itertools.islice(jobs, FIRST))
    _refuse_wrong(first)
    return itertools.chain(first, jobs)


def all_jobs(
    path: str, jsonl: bool | None, parameters: Mapping[str, Any], chat: bool, loras: Sequence[str] = ()
) -> list[Job]:
    """See `read_jobs`; all of them are read, and none is wrong."""
    jobs = list(read_jobs(path, jsonl, parameters, chat, loras))
    _refuse_wrong(jobs)
    return jobs


def _refuse_wrong(jobs: list[Job]) -> None:
    errors = [f"{job.where}: {job.error}" for job in jobs if job.error is not None]
    if errors:
        more = f" (and {len(errors) - 1} more wrong lines)" if len(errors) > 1 else ""
        raise UsageError(errors[0] + more)


def count_lines(path: str) -> int | None:
    """Lines of a file that are not blank, in one quick pass; None for what can be read only once."""
    if path == "-" or not Path(path).is_file():
        return None
    with open(path, "rb") as file:
        return sum(1 for line in file if not line.isspace())


def _lines(path: str, name: str) -> Iterator[bytes]:
    """Without ends of line and byte-order mark."""
    try:
        file: IO[bytes] = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
        with file:
            for number, line in enumerate(file):
                if number == 0:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                yield line.removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error


def _identity(raw: bytes) -> dict[str, Any]:
    """The id, and the form, of a line that is wrong otherwise, so that its error can be told to belong to it."""
    try:
        record = json.loads(raw)
        id = _id_of(record)
        return {"id": id, "batch": BatchLine("", "") if "body" in record else None}
    except (ValueError, TypeError, UsageError):
        return {}


def _id_of(record: dict[str, Any]) -> tuple[str, str | int] | None:
    keys = [key for key in ID_KEYS if key in record]
    if len(keys) > 1:
        raise UsageError("a line needs one of id and custom_id; it has both")
    if not keys:
        return None
    value = record[keys[0]]
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise UsageError(f"{keys[0]}={value!r} is not allowed: a text or an integer")
    return keys[0], value


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
    id = _id_of(record)
    if "body" in record:
        fields, batch = BatchLine.parse(record, loras)
        job = _json_record(where, fields, parameters, False, loras)
        return replace(job, id=id, batch=batch, given=frozenset(fields))
    return replace(_json_record(where, record, parameters, chat, loras), id=id, given=frozenset(record))


def _json_record(
    where: str, record: dict[str, Any], parameters: Mapping[str, Any], chat: bool, loras: Sequence[str]
) -> Job:
    known = (*PROMPT_KEYS, *ID_KEYS, "lora", *_PARAMETERS)
    for key in record:
        if key not in known:
            raise UsageError(f"unknown key {key!r}.{did_you_mean(key, known)} Known: {', '.join(known)}")
    kinds = [key for key in PROMPT_KEYS if key in record]
    if len(kinds) != 1:
        has = " and ".join(kinds) or "none"
        raise UsageError(f"a line needs exactly one of {', '.join(PROMPT_KEYS)}; it has {has}")
    if kinds[0] == "messages":
        parameters = {"max_tokens": None, **parameters}  # an answer runs to its end
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
