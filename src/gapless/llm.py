"""LLM: many prompts in, all results out. For programs without an event loop."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gapless.config import EngineConfig
from gapless.engine.client import EngineClient, Submission
from gapless.engine.control import PauseMode
from gapless.engine.progress import INTERVAL, Pace
from gapless.engine.stats import EngineStats
from gapless.errors import EngineClosedError, EngineDeadError, RequestError, naming_prompt
from gapless.model.weights import Named
from gapless.request.outputs import RequestOutput
from gapless.request.sampling_params import SamplingParams
from gapless.scheduler.stats import SchedulerStats
from gapless.text.chat import EncodedPrompt

logger = logging.getLogger("gapless")


class LLM:
    """A model and the engine that runs it. It ends by `close`, or with the last reference to it.

    Args:
        model: a Hugging Face folder or name, a GGUF file, or a ``transformers`` model that you have already. It is not
            changed, and its weights are shared: on a GPU neighbouring projections (q, k, v; gate, up) are merged, and
            your parameters become views of the merged storage, with the values that they had.
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
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str | None] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results come in the order of the prompts.

        Args:
            prompts: one or many; each a text or ``{"prompt_token_ids": [...]}``. In an engine made with
                ``max_prompt_embeds`` also ``{"prompt_embeds": tensor}``, what the model's embedding would give,
                ``[tokens, hidden_size]``; or both, with ``"prompt_embeds_positions": [...]``, the tokens that it
                replaces.
            sampling_params: one for all, or one for each prompt. None: the defaults of the model's
                ``generation_config.json``, see `EngineConfig.generation_config`.
            use_tqdm: show a progress bar.
            priority: one for all or one for each prompt; lower runs earlier, within one priority the first to come.
            cache_salt: one for all or one for each prompt, 1 to 1024 characters. Prompts share cached blocks only with
                those of an equal salt, so that nobody can tell from the time whose prompt was here before.
            lora: the name of a loaded adapter for all, or a name or None for each prompt; see `load_lora`.

        Raises:
            RequestError: a prompt or its parameters cannot be served; then none is started.
            EngineDeadError: the engine stopped, with the cause.
        """
        many = [prompts] if isinstance(prompts, (str, Mapping)) else _listed("prompts", prompts)
        encoded = self._encoded(many, self._client.encode)
        return self._run(encoded, sampling_params, use_tqdm, priority, cache_salt, lora)

    def chat(
        self,
        conversations: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str | None] | None = None,
        lora: str | Sequence[str | None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, each a list of ``{"role": ..., "content": ...}``; one conversation or a list of them.

        ``template_options`` go to the tokenizer's chat template. The rest, and what is raised, is as in `generate`.
        """
        many = _listed("conversations", conversations)
        if many and isinstance(many[0], Mapping):
            many = [many]
        encode = functools.partial(self._client.encode_chat, **template_options)
        return self._run(self._encoded(many, encode), sampling_params, use_tqdm, priority, cache_salt, lora)

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
        priority: int | Sequence[int],
        cache_salt: str | Sequence[str | None] | None,
        lora: str | Sequence[str | None] | None,
    ) -> list[RequestOutput]:
        params = _one_each(self._client.default_params() if sampling_params is None else sampling_params, len(prompts))
        collector = _Collector(len(prompts), Pace(self._client.stats) if use_tqdm else None)
        priorities = _each("priority", priority, len(prompts))
        salts = _each("cache_salt", cache_salt, len(prompts))
        loras = _each("lora", lora, len(prompts))
        if self.is_paused or self.is_sleeping:
            logger.warning("the engine is paused or asleep: these requests wait until another thread lets it go on")
        groups = self._client.submit(
            [
                Submission(p, s, collector.output(i), collector.error, priority=rank, cache_salt=salt, lora=name)
                for i, (p, s, rank, salt, name) in enumerate(
                    zip(prompts, params, priorities, salts, loras, strict=True)
                )
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
        """Copies of the engine's and the scheduler's counters, made by the loop between two steps.

        A step that takes longer than half a second is not waited for.
        """
        return self._client.stats()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._client.tokenizer

    @property
    def config(self) -> EngineConfig:
        """The options, with the model's ``max_model_len`` filled in. How many blocks there are is in `stats`."""
        return self._client.config

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. `update_weights` does so itself.

        Running requests go on with their own blocks, which nobody will find any more; a later request computes its
        whole prompt. May be called from any thread and at any time.
        """
        self._client.reset_prefix_cache()

    # ---- between steps: weights, pause, sleep. Each may be called from any thread -----------------------------------

    def update_weights(self, weights: Named | None = None, *, recompute: bool = True) -> int:
        """Let later steps use new weights. Returns the number of updates so far, which outputs carry.

        The steps in flight end first, and what the calling thread has enqueued on its current CUDA stream (an
        optimizer's step) is waited for. Then the prefix cache is empty and the version counts one more.

        Args:
            weights: None: the parameters of the model object that the engine was made from have changed. Where they
                still lie at their addresses nothing is copied. Otherwise tensors by the model's names, all or some; a
                floating-point one of another dtype is converted.
            recompute: requests that are running compute their past again with the new weights. Otherwise they keep
                what the old ones computed, which is quicker and mixes the two.

        Raises:
            WeightError: a name is unknown, or a tensor does not fit; nothing has been changed.
        """
        return self._client.update_weights(self._client.prepare_weights(weights), recompute=recompute)

    @property
    def weight_version(self) -> int:
        """How often the weights were updated; `RequestOutput.weight_version` says it of a result."""
        return self._client.weight_version

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the engine."""
        return self._client.is_paused

    @property
    def is_sleeping(self) -> bool:
        """Whether its memory is given back, see `sleep`."""
        return self._client.is_sleeping

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop computing; return when the device has nothing more to do. New requests queue until `resume`.

        Args:
            mode: "keep": running requests stop where they are and go on later, also if a pause of mode "finish" waits
                for them. "abort": every request ends, with finish reason ``abort``. "finish": those that were
                submitted before run to their end first; a `resume` from another thread ends the wait. In a pause,
                "keep" and "finish" change nothing.
        """
        self._client.pause(mode)

    def resume(self) -> None:
        """Go on after `pause`. Without a pause nothing happens."""
        self._client.resume()

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake`: KV cache and graphs; with level 2 the weights too.

        Running requests compute their past again when they go on; new ones queue. Level 2 is for models that the
        engine loaded itself, and on a CPU, where the weights are on the host already, it is level 1.
        """
        self._client.sleep(level)

    def wake(self) -> None:
        """Take the memory again and go on, unless paused. Awake nothing happens.

        Raises:
            ConfigError: the memory is not there; the engine sleeps on.
        """
        self._client.wake()

    # ---- adapters ---------------------------------------------------------------------------------------------------

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a folder of PEFT's, while requests run; ``generate(..., lora=name)`` then runs with
        it. The engine must have been made with ``enable_lora=True``. See docs/lora.md.

        Raises:
            AdapterError: it cannot be served, the name is taken, or no slot is free.
        """
        self._client.adapters.load(name, path)

    def unload_lora(self, name: str) -> None:
        """Take an adapter's name away at once. Requests that have it go on to their end; then its slot is free.

        Raises:
            AdapterError: there is no such adapter.
        """
        self._client.adapters.unload(name)

    @property
    def loras(self) -> list[str]:
        """Names of the adapters that are loaded."""
        return self._client.adapters.names

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
        raise RequestError(f"{name} of type {type(several).__name__} is not allowed: give a list")
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


def _each(name: str, given: Any, count: int) -> list[Any]:
    """One value for each of ``count`` prompts; a single one stands for all. The engine checks the values."""
    if given is None or isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{count} prompts but {len(given)} values of {name}: give one for all, or one for each")
    return list(given)


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
