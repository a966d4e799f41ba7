"""What a file of results holds already, in a few bytes a result, so that a job can go on where it was cut off.

A result is known by the ``id`` or ``custom_id`` of its line; without one by its index, and then its prompt must be the
one that is there. A last line that is not whole, as a kill leaves it, is taken off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gapless.cli.parser import UsageError
from gapless.cli.prompts import Job


class Digests:
    """A set of 64-bit digests: 8 bytes each, and a small ordinary set of the newest."""

    def __init__(self, recent: int = 65536) -> None:
        self._sorted = np.empty(0, dtype=np.uint64)
        self._recent: set[int] = set()
        self._most = recent

    def add(self, text: str) -> bool:
        """Whether it is new."""
        if text in self:
            return False
        self._recent.add(_digest(text))
        if len(self._recent) >= self._most:
            newest = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
            self._sorted = np.union1d(self._sorted, newest)
            self._recent = set()
        return True

    def __contains__(self, text: str) -> bool:
        digest = _digest(text)
        if digest in self._recent:
            return True
        at = int(np.searchsorted(self._sorted, np.uint64(digest)))
        return at < len(self._sorted) and int(self._sorted[at]) == digest

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class Done:
    """Results that are there. Empty until `read`."""

    def __init__(self) -> None:
        self._names = Digests()
        self._prompts = Digests()
        self.count = 0

    def read(self, path: Path) -> None:
        """Take in a file of results, and cut off a last line that is torn.

        Raises:
            UsageError: a line in its middle is none of a result.
        """
        with path.open("r+b") as file:
            whole = 0
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    file.truncate(whole)
                    break
                if line.strip():
                    self._take(line, f"{path}:{number}")
                whole += len(line)

    def _take(self, line: bytes, where: str) -> None:
        try:
            record = json.loads(line)
            name, prompt = _name(record), _prompt(record)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"--resume: {where} is no line of a result ({error}): give the file that --output wrote, or another"
            ) from None
        self.count += self._names.add(name)
        if prompt is not None:
            self._prompts.add(f"{name} {prompt}")

    def __contains__(self, job: Job) -> bool:
        """Raises:
        UsageError: the result with the job's index is of another prompt.
        """
        if not self.count:
            return False
        record: dict[str, Any] = {"index": job.index, **({} if job.id is None else {job.id[0]: job.id[1]})}
        name = _name(record)
        if name not in self._names:
            return False
        if job.id is None and job.error is None:
            given = job.prompt if isinstance(job.prompt, dict) else {"prompt": job.prompt}
            prompt = _prompt({"messages": job.messages} if job.messages is not None else given)
            if f"{name} {prompt}" not in self._prompts and f"{name} error" not in self._prompts:
                raise UsageError(
                    f"--resume: {job.where} is not the prompt whose result stands under index {job.index}: the input "
                    "has changed. Give its lines an id, or write to another --output"
                )
        return True


def unique(jobs: Iterator[Job]) -> Iterator[Job]:
    """The same jobs. An id that came before is an error: nobody could tell the results of the two apart."""
    seen = Digests()
    for job in jobs:
        if job.id is not None and not seen.add(json.dumps(job.id)):
            job = replace(job, error=f"{job.id[0]}={job.id[1]!r} is the id of an earlier line too")
        yield job


def _name(record: dict[str, Any]) -> str:
    for key in ("custom_id", "id"):  # lines of batch files have an id of the response beside their own
        if key in record:
            return json.dumps([key, record[key]])
    return json.dumps(int(record["index"]))


def _prompt(record: dict[str, Any]) -> str | None:
    if "error" in record and "response" not in record:
        return "error"
    if "messages" in record:
        return json.dumps(record["messages"], sort_keys=True)
    if record.get("prompt") is not None:
        return json.dumps(record["prompt"])
    return json.dumps(record["prompt_token_ids"]) if "prompt_token_ids" in record else None
