"""Results to a file or standard output, text or JSONL: whole lines, as requests end or in the order of the prompts."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import IO, Any

from gapless.cli.prompts import Job
from gapless.request.outputs import RequestOutput

FORMATS = ("text", "jsonl")


class Writer:
    """Used by one thread. A result is in the file when `put` returns, whole, so that a kill loses none before it.

    Args:
        file: text, UTF-8.
        jsonl: one object a line instead of text.
        model: what answers to batch files call the model, if the request names none.
        ordered: a result is kept until all before it are written.
        titles: a line above each text; a single text can do without.
    """

    def __init__(
        self, file: IO[str], jsonl: bool, *, model: str = "", ordered: bool = False, titles: bool = True
    ) -> None:
        self._file = file
        self._jsonl = jsonl
        self._model = model
        self._ordered = ordered
        self._titles = titles
        self._waiting: dict[int, str] = {}
        self._next = 0

    def put(self, job: Job, output: RequestOutput | None, error: str | None = None) -> int:
        """Take the finished output of a job, or why it has none. Returns how many results have been written by it."""
        form = self._json if self._jsonl else self._text
        return self._write(job.index, form(job, output, error))

    def skip(self, index: int) -> int:
        """The result of this prompt is there already."""
        return self._write(index, "") if self._ordered else 1

    def _write(self, index: int, text: str) -> int:
        if not self._ordered:
            self._append(text)
            return 1
        self._waiting[index] = text
        before = self._next
        while self._next in self._waiting:
            self._append(self._waiting.pop(self._next))
            self._next += 1
        return self._next - before

    def _append(self, text: str) -> None:
        """All of it or, where the disk is full, nothing."""
        if not text:
            return
        regular = self._file is not sys.stdout and self._file.seekable()
        end = os.fstat(self._file.fileno()).st_size if regular else 0
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:
            if regular:
                os.ftruncate(self._file.fileno(), end)
            raise

    def _json(self, job: Job, output: RequestOutput | None, error: str | None) -> str:
        form = _own_form if job.batch is None else self._batch_form
        return json.dumps(form(job, output, error), ensure_ascii=False) + "\n"

    def _batch_form(self, job: Job, output: RequestOutput | None, error: str | None) -> dict[str, Any]:
        assert job.batch is not None
        request = f"batch_req_{job.index}"
        if output is None:
            failure = {"message": error, "type": "invalid_request_error", "code": "invalid_request"}
            status, body = 400, {"error": failure}
        else:
            status, body = 200, job.batch.response(request, output, self._model)
        return {
            "id": request,
            "custom_id": None if job.id is None else job.id[1],
            "response": {"status_code": status, "request_id": request, "body": body},
            "error": None if error is None else {"code": "invalid_request", "message": error},
        }

    def _text(self, job: Job, output: RequestOutput | None, error: str | None) -> str:
        if output is None:
            return f"=== {job.index + 1}: {job.title}\n[{error}]\n\n"
        if not self._titles and len(output.outputs) == 1:
            return output.outputs[0].text + "\n"
        parts = []
        for completion in output.outputs:
            many = len(output.outputs) > 1
            which = f"{job.index + 1}.{completion.index + 1}" if many else str(job.index + 1)
            parts.append(f"=== {which}: {job.title}\n{completion.text}\n\n")
        return "".join(parts)


def _own_form(job: Job, output: RequestOutput | None, error: str | None) -> dict[str, Any]:
    record: dict[str, Any] = {"index": job.index}
    if job.id is not None:
        record[job.id[0]] = job.id[1]
    if job.messages is not None:
        record["messages"] = job.messages
    if output is None:
        return {**record, "error": error}
    return {
        **record,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [asdict(completion) for completion in output.outputs],
    }
