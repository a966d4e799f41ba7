"""AsyncLLM: the same engine for programs with an event loop. Each request is an async generator of outputs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

from gapless.config import EngineConfig
from gapless.engine.client import EngineClient, Submission
from gapless.engine.control import PauseMode
from gapless.engine.stats import EngineStats
from gapless.errors import EngineClosedError, EngineDeadError, RequestError
from gapless.model.weights import Named
from gapless.request.outputs import RequestOutput
from gapless.request.sampling_params import RequestOutputKind, SamplingParams
from gapless.scheduler.stats import SchedulerStats
from gapless.text.chat import EncodedPrompt
from gapless.text.outputs import OutputMode, accumulate

_MODES: dict[RequestOutputKind, OutputMode] = {
    RequestOutputKind.CUMULATIVE: "stream",
    RequestOutputKind.DELTA: "delta",
    RequestOutputKind.FINAL_ONLY: "final",
}


class AsyncLLM:
    """See `LLM` for the arguments. May be made and used inside a running event loop, and from several at once."""

    def __init__(self, model: Any, *, tokenizer: Any = None, **options: Any) -> None:
        config = EngineConfig.from_dict(options)
        self._client = EngineClient(model, config, "auto" if tokenizer is None else tokenizer)

    async def generate(
        self,
        prompt: str | dict[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        mode: OutputMode | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, piece by piece.

        A consumer that is slower than the engine gets several steps' tokens in one piece; nothing is lost. Leaving the
        loop early, or cancelling the task, aborts the request.

        Args:
            prompt: a text or ``{"prompt_token_ids": [...]}``.
            sampling_params: by default those of the model's ``generation_config.json``.
            request_id: a label for `abort`; need not be unique.
            mode: "stream", each output holds everything so far; "delta", only what is new; "final", one output. None:
                as ``sampling_params.output_kind`` says.
            priority, cache_salt: see `LLM.generate`.
            lora: the name of a loaded adapter, see `load_lora`; None for the model alone.

        Raises:
            RequestError: the request cannot be served.
            EngineDeadError: the engine stopped, with the cause.
        """
        encoded = self._client.encode(prompt)
        options = (priority, cache_salt, lora)
        async with aclosing(self._run(encoded, sampling_params, request_id, mode, options)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        mode: OutputMode | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation; see `generate`. ``template_options`` go to the chat template."""
        encoded = self._client.encode_chat(messages, **template_options)
        options = (priority, cache_salt, lora)
        async with aclosing(self._run(encoded, sampling_params, request_id, mode, options)) as outputs:
            async for output in outputs:
                yield output

    async def _run(
        self,
        encoded: EncodedPrompt,
        params: SamplingParams | None,
        request_id: str | None,
        mode: OutputMode | None,
        options: tuple[int, str | None, str | None],
    ) -> AsyncGenerator[RequestOutput, None]:
        params = self._client.default_params() if params is None else params
        priority, cache_salt, lora = options
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params of type {type(params).__name__} is not allowed: a SamplingParams is")
        if mode is None:
            mode = _MODES[RequestOutputKind(params.output_kind)]
        mailbox = _Mailbox(asyncio.get_running_loop(), merge=mode == "delta")
        take, fail = mailbox.put, mailbox.fail
        submission = Submission(encoded, params, take, fail, mode, request_id, priority, cache_salt, lora)
        if params.structured_outputs is not None:
            await asyncio.to_thread(self._client.compile, params)
        (group,) = self._client.submit([submission])
        finished = False
        try:
            while not finished:
                output = await mailbox.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._client.abort_group(group)

    async def abort(self, request_id: str) -> None:
        """End the requests with this label; each still gets its final output. Unknown labels are ignored."""
        self._client.abort(request_id)

    def stats(self) -> tuple[EngineStats, SchedulerStats]:
        """See `LLM.stats`."""
        return self._client.stats()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._client.tokenizer

    @property
    def config(self) -> EngineConfig:
        """See `LLM.config`."""
        return self._client.config

    async def reset_prefix_cache(self) -> None:
        """See `LLM.reset_prefix_cache`."""
        await asyncio.to_thread(self._client.reset_prefix_cache)

    async def update_weights(self, weights: Named | None = None, *, recompute: bool = True) -> int:
        """See `LLM.update_weights`. Other requests go on meanwhile, up to the update itself."""
        update = self._client.prepare_weights(weights)  # here: the current CUDA stream is of this thread
        return await asyncio.to_thread(self._client.update_weights, update, recompute=recompute)

    @property
    def weight_version(self) -> int:
        """How often the weights were updated."""
        return self._client.weight_version

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the engine."""
        return self._client.is_paused

    @property
    def is_sleeping(self) -> bool:
        """Whether its memory is given back, see `LLM.sleep`."""
        return self._client.is_sleeping

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `LLM.pause`."""
        await asyncio.to_thread(self._client.pause, mode)

    async def resume(self) -> None:
        """See `LLM.resume`."""
        await asyncio.to_thread(self._client.resume)

    async def sleep(self, level: int = 1) -> None:
        """See `LLM.sleep`."""
        await asyncio.to_thread(self._client.sleep, level)

    async def wake(self) -> None:
        """See `LLM.wake`."""
        await asyncio.to_thread(self._client.wake)

    async def load_lora(self, name: str, path: str | Path) -> None:
        """See `LLM.load_lora`."""
        await asyncio.to_thread(self._client.adapters.load, name, path)

    async def unload_lora(self, name: str) -> None:
        """See `LLM.unload_lora`."""
        await asyncio.to_thread(self._client.adapters.unload, name)

    @property
    def loras(self) -> list[str]:
        """Names of the adapters that are loaded."""
        return self._client.adapters.names

    def close(self) -> None:
        """Give threads and memory back; open requests fail with `EngineClosedError`. Safe to call twice."""
        self._client.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


class _Mailbox:
    """The latest output of one request: filled by the output thread, emptied by one task.

    Outputs that were not taken yet are replaced by the next one (they are cumulative) or merged with it (deltas).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, merge: bool) -> None:
        self._loop = loop
        self._merge = merge
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        with self._lock:
            if self._merge and self._output is not None:
                accumulate(self._output, output)
            else:
                self._output = output
        self._wake()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.set)

    async def get(self) -> RequestOutput:
        await self._ready.wait()
        with self._lock:
            self._ready.clear()
            if isinstance(self._error, EngineClosedError):
                raise EngineClosedError(str(self._error)) from self._error
            if self._error is not None:
                raise EngineDeadError(f"the request did not end: {self._error!r}") from self._error
            output, self._output = self._output, None
        return output if output is not None else await self.get()
