"""RequestClient: prompts in, outputs back, through an engine in this process or in another.

Threads: callers submit from any thread. What a step brings goes through the `OutputProcessor` on the output side's.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from gapless.config import EngineConfig
from gapless.engine.open_groups import OpenGroups
from gapless.engine.service import EngineService
from gapless.engine.stats import EngineStats
from gapless.engine.submission import RequestMaker, Submission
from gapless.errors import RequestError, naming_prompt
from gapless.request.outputs import FinishReason, RequestOutput
from gapless.request.request import LoraRef, Request
from gapless.request.sampling_params import SamplingParams
from gapless.scheduler.stats import SchedulerStats
from gapless.text.chat import EncodedPrompt, encode_chat, encode_prompt
from gapless.text.outputs import OutputProcessor, RequestGroup

SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}


class RequestClient:
    """See the module.

    Attributes:
        service: the engine, set by `_serve`.
        config: of it.
        tokenizer: a ``transformers`` tokenizer, or None.
        sampling_defaults: what `SamplingParams` start from where a request gives nothing.
    """

    service: EngineService
    config: EngineConfig
    sampling_defaults: dict[str, float]

    def __init__(self, tokenizer: Any) -> None:
        stop = weakref.WeakMethod(self._on_stop)  # as all that threads come to hold: see `gapless.engine.lifetime`
        self._outputs = OutputProcessor(lambda request_id: None if (ask := stop()) is None else ask(request_id))
        self._groups = OpenGroups()
        self._label = f"{secrets.token_hex(4)}-"  # of requests without one: nobody's own labels begin so
        self.tokenizer = tokenizer

    def _serve(
        self, service: EngineService, config: EngineConfig, sampling_defaults: Mapping[str, float] | None = None
    ) -> None:
        self.service, self.config = service, config
        self.sampling_defaults = dict(sampling_defaults or {})
        self._maker = RequestMaker(service, config, self.tokenizer)
        self.derived_seed = self._maker.derived_seed

    def default_params(self) -> SamplingParams:
        """Of a request that gives none."""
        return SamplingParams.from_dict(self.sampling_defaults)

    def encode(self, prompt: object) -> EncodedPrompt:
        """A prompt as ids, checked."""
        if isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            from gapless.text.prompt_embeds import encode_embeds  # late: it is torch's

            width, dtype = self.service.embeds_width, self.service.dtype
            return encode_embeds(prompt, self.service.vocab_size, width, dtype, self.config.max_prompt_embeds)
        return encode_prompt(prompt, self.tokenizer, self.service.vocab_size)

    def encode_chat(self, messages: object, **options: Any) -> EncodedPrompt:
        """A conversation as ids, through the tokenizer's chat template, which ``options`` go to."""
        for name in SAMPLING_FIELDS & options.keys():
            raise RequestError(
                f"{name}={options[name]!r} would go to the chat template: give SamplingParams({name}=...)"
            )
        return encode_chat(messages, self.tokenizer, self.service.vocab_size, **options)

    def submit(self, submissions: Sequence[Submission]) -> list[RequestGroup]:
        """Check all, then hand all to the engine in one turn of its loop. Either all are taken or none.

        Raises:
            RequestError: naming the request and what is wrong with it.
            EngineDeadError, EngineClosedError: no more work is taken.
        """
        self.service.raise_if_dead()
        for i, submission in enumerate(submissions):
            if submission.lora is not None and isinstance(submission.params, SamplingParams):
                with naming_prompt(i, len(submissions)):
                    self.compile(submission.params)  # now, since it can take seconds, and not within the lock
        with self.service.locked([submission.lora for submission in submissions]) as loras:
            return self._submit(submissions, loras)

    def _submit(self, submissions: Sequence[Submission], loras: list[LoraRef | None]) -> list[RequestGroup]:
        requests: list[Request] = []
        groups: list[RequestGroup] = []
        for i, submission in enumerate(submissions):
            with naming_prompt(i, len(submissions)):
                if submission.lora is not None:
                    self.service.refuse_unknown_lora(submission.lora)
                made = self._maker.make(submission, loras[i])
                groups.append(self._group(submission, made))
            requests.extend(made)
        for request, group in zip(requests, (g for g in groups for _ in g.ids), strict=True):
            request.streaming = group.needs_tokens
        for group in groups:
            self._outputs.add(group)
        with self._groups.lock:  # who finds a label can end it: its requests are before the abort in the inbox
            self._groups.add(groups)
            self.service.submit(requests)
        return groups

    def abort(self, request_id: str) -> None:
        """End every open request with this label; each still gets its final output. Unknown labels are ignored."""
        for group in self._groups.find(request_id):
            self._outputs.abort(group)

    def abort_group(self, group: RequestGroup) -> None:
        """End one request."""
        self._outputs.abort(group)

    def compile(self, params: SamplingParams) -> None:
        """Compile what `submit` would, so that it finds it ready: for threads that must not wait for seconds.

        Raises:
            RequestError: naming the field and what is wrong with it.
        """
        if params.structured_outputs is not None:
            self.service.compile(params)

    def _group(self, submission: Submission, requests: list[Request]) -> RequestGroup:
        label = submission.request_id if submission.request_id is not None else f"{self._label}{requests[0].id}"
        open_groups = self._groups  # and not this client, which nobody may refer to any more while a request runs

        def deliver(output: RequestOutput) -> None:
            if output.finished:
                open_groups.forget(group)
            submission.on_output(output)

        def fail(error: BaseException) -> None:
            open_groups.forget(group)
            submission.on_error(error)

        group = RequestGroup(
            request_id=label,
            prompt=submission.prompt.text,
            prompt_token_ids=submission.prompt.token_ids,
            params=submission.params,
            ids=[r.id for r in requests],
            on_output=deliver,
            on_error=fail,
            tokenizer=self.tokenizer,
            arrival_time=requests[0].arrival,
            mode=submission.mode,
            on_text=submission.on_text,
        )
        return group

    def _on_stop(self, request_id: int) -> None:
        self.service.finish(request_id, FinishReason.ABORT)

    @property
    def pending(self) -> int:
        """Requests that have not had their last output."""
        return self._outputs.pending

    def stats(self) -> tuple[EngineStats, SchedulerStats]:
        """Copies of the engine's and the scheduler's counters, as they are now."""
        return self.service.stats()
