"""LLM: many prompts in, all results out. For programs without an event loop."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from gapless.client import EngineClient, Submission
from gapless.config import EngineConfig
from gapless.engine import EngineStats
from gapless.errors import EngineClosedError, EngineDeadError, RequestError, naming_prompt
from gapless.pace import INTERVAL, Pace
from gapless.request import RequestOutput, SamplingParams
from gapless.scheduler import SchedulerStats
from gapless.text.chat import EncodedPrompt


class LLM:
    """A model and the engine that runs it.

    Args:
        model: a Hugging Face folder or name, a GGUF file, or a ``transformers`` model that you have already (it is not
            changed, and its weights are shared).
        tokenizer: a ``transformers`` tokenizer; by default the model's own, if there is one.
        options: every field of `EngineConfig`, by name.

    Raises:
        ConfigError: an option is unknown or out of range, or does not fit this machine.
        UnsupportedModelError: the model holds a part that the engine would compute wrongly.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **options: Any) -> None:
        config = EngineConfig.from_dict(options)
        self._client = EngineClient(model, config, "auto" if tokenizer is None else tokenizer)

    def generate(
        self,
        prompts: str | dict[str, Any] | Sequence[str | dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; results come in the order of the prompts.

        Args:
            prompts: one or many; each a text or ``{"prompt_token_ids": [...]}``.
            sampling_params: one for all, or one for each prompt.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: a prompt or its parameters cannot be served; then none is started.
            EngineDeadError: the engine stopped, with the cause.
        """
        many = [prompts] if isinstance(prompts, (str, Mapping)) else _listed("prompts", prompts)
        return self._run(self._encoded(many, self._client.encode), sampling_params, use_tqdm)

    def chat(
        self,
        conversations: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, each a list of ``{"role": ..., "content": ...}``; one conversation or a list of them.

        ``template_options`` go to the tokenizer's chat template. Raises as `generate`.
        """
        many = _listed("conversations", conversations)
        if many and isinstance(many[0], Mapping):
            many = [many]
        encode = functools.partial(self._client.encode_chat, **template_options)
        return self._run(self._encoded(many, encode), sampling_params, use_tqdm)

    @staticmethod
    def _encoded(prompts: Sequence[Any], encode: Callable[[Any], EncodedPrompt]) -> list[EncodedPrompt]:
        encoded = []
        for i, prompt in enumerate(prompts):
            with naming_prompt(i, len(prompts)):
                encoded.append(encode(prompt))
        return encoded

    def _run(
        self,
        prompts: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(prompts))
        collector = _Collector(len(prompts), Pace(self._client.stats) if use_tqdm else None)
        groups = self._client.submit(
            [
                Submission(p, s, collector.output(i), collector.error)
                for i, (p, s) in enumerate(zip(prompts, params, strict=True))
            ]
        )
        try:
            return collector.wait()
        except BaseException:
            for group in groups:
                self._client.abort_group(group)
            raise
        finally:
            collector.close()

    def stats(self) -> tuple[EngineStats, SchedulerStats]:
        """The engine's and the scheduler's counters."""
        return self._client.stats()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._client.tokenizer

    @property
    def config(self) -> EngineConfig:
        """The options, with what was left open filled in."""
        return self._client.config

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: needed after a change of the weights."""
        self._client.reset_prefix_cache()

    def close(self) -> None:
        """Give threads and memory back. Safe to call twice."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _listed(name: str, several: Any) -> list[Any]:
    if isinstance(several, (str, bytes, Mapping)) or not isinstance(several, Iterable):
        raise RequestError(f"{name} of type {type(several).__name__} is not allowed: a list is")
    return list(several)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    kind = type(params).__name__
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling_params of type {kind} are not allowed: give a SamplingParams or a list of them")
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} sampling_params: give one for all, or one for each")
    for i, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise RequestError(f"sampling_params[{i}] is of type {type(each).__name__}: give a SamplingParams")
    return list(params)


class _Collector:
    """Gathers the final outputs of one call. Filled by the output thread, waited for by the caller."""

    def __init__(self, count: int, pace: Pace | None) -> None:
        self._outputs: list[RequestOutput | None] = [None] * count
        self._left = count
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._pace = pace
        self._bar: Any = None
        if count == 0:
            self._done.set()
        elif pace is not None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=count, desc="requests", dynamic_ncols=True)

    def output(self, index: int) -> Any:
        def take(output: RequestOutput) -> None:
            self._outputs[index] = output
            self._left -= 1
            if self._bar is not None:
                self._bar.update()
            if self._left == 0:
                self._done.set()

        return take

    def error(self, error: BaseException) -> None:
        self._error = self._error or error
        self._done.set()

    def wait(self) -> list[RequestOutput]:
        while not self._done.wait(None if self._bar is None else INTERVAL):
            self._bar.set_postfix_str(str(self._pace))
        if self._bar is not None:
            self._bar.set_postfix_str(str(self._pace))
        if isinstance(self._error, EngineClosedError):
            raise EngineClosedError(str(self._error)) from self._error
        if self._error is not None:
            raise EngineDeadError(f"the request did not end: {self._error!r}") from self._error
        return [output for output in self._outputs if output is not None]

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
