"""Results to a file or standard output, as text or JSONL, in the order of the prompts."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import IO

from gapless.cli.prompts import Job
from gapless.request.outputs import RequestOutput

FORMATS = ("text", "jsonl")


class Writer:
    """Writes each result as soon as all before it are written. Used by one thread.

    Args:
        file: text, UTF-8.
        jobs: decide the order. A single text is written alone; of several, each has a title line.
        jsonl: one object a line instead of text.
    """

    def __init__(self, file: IO[str], jobs: list[Job], jsonl: bool) -> None:
        self._file = file
        self._jobs = jobs
        self._jsonl = jsonl
        self._waiting: dict[int, RequestOutput] = {}
        self._next = 0

    def put(self, index: int, output: RequestOutput) -> None:
        """Take the finished output of job ``index``."""
        self._waiting[index] = output
        while self._next in self._waiting:
            form = self._json if self._jsonl else self._text
            self._file.write(form(self._next, self._waiting.pop(self._next)))
            self._next += 1
        self._file.flush()

    def _json(self, index: int, output: RequestOutput) -> str:
        job = self._jobs[index]
        record = {
            "index": index,
            **({"messages": job.messages} if job.messages is not None else {}),
            "prompt": output.prompt,
            "prompt_token_ids": output.prompt_token_ids,
            "outputs": [asdict(completion) for completion in output.outputs],
        }
        return json.dumps(record, ensure_ascii=False) + "\n"

    def _text(self, index: int, output: RequestOutput) -> str:
        if len(self._jobs) == 1 and len(output.outputs) == 1:
            return output.outputs[0].text + "\n"
        title = self._jobs[index].title
        parts = []
        for completion in output.outputs:
            which = f"{index + 1}.{completion.index + 1}" if len(output.outputs) > 1 else str(index + 1)
            parts.append(f"=== {which}: {title}\n{completion.text}\n\n")
        return "".join(parts)
