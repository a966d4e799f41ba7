"""EngineClient: what `LLM` and `AsyncLLM` share. An engine, its output side, and the checks before both.

Threads: callers submit from any thread. The loop's thread puts one message per step into a queue; the output thread
takes it, detokenizes, and calls back. A request is checked here, on the caller's thread, so that a bad one is an
exception at the call and never comes near the loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import queue
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.config import EngineConfig
from gapless.engine import pause
from gapless.engine.control import PauseMode
from gapless.engine.lifetime import Lifetime
from gapless.engine.open_groups import OpenGroups
from gapless.engine.stats import EngineStats
from gapless.errors import ConfigError, RequestError, naming_prompt
from gapless.grammar.compiler import GrammarCompiler
from gapless.request.messages import StepMessage
from gapless.request.outputs import FinishReason, RequestOutput
from gapless.request.request import LoraRef, Request, cache_key, check_priority
from gapless.request.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from gapless.scheduler.stats import SchedulerStats
from gapless.text.chat import EncodedPrompt, encode_chat, encode_prompt
from gapless.text.completion import TakeText
from gapless.text.outputs import OutputMode, OutputProcessor, RequestGroup
from gapless.text.vocabulary import bad_word_ids, check_vocabulary

if TYPE_CHECKING:
    from gapless.engine.assemble import Built, Progress
    from gapless.model.weights import Named
    from gapless.runner.keys import Key

logger = logging.getLogger("gapless")

SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}

_SEED_MASK = 2**64 - 1
_SEED_STEP = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: far from any small seed


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt, ready to go."""

    prompt: EncodedPrompt
    params: SamplingParams
    on_output: Callable[[RequestOutput], None]
    on_error: Callable[[BaseException], None]
    mode: OutputMode = "final"
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    lora: str | None = None  # name of a loaded adapter
    on_text: TakeText | None = None  # see `RequestGroup`


def _capture_bar(keys: list[Key]) -> Any:
    from tqdm.auto import tqdm

    return tqdm(keys, desc="graphs", disable=None, leave=False)  # None: only on a terminal


def find_tokenizer(model: Any, tokenizer: Any) -> Any:
    """The tokenizer that is meant: an object as it is, a folder or name loaded, ``"auto"`` the model's own."""
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return tokenizer
    from gapless.model.load.loading import check_source, load_tokenizer

    if tokenizer == "auto":
        if isinstance(model, (str, Path)):
            check_source(model)  # first, or the tokenizer would be blamed for a config that cannot be read
            return load_tokenizer(model)
        with contextlib.suppress(ConfigError):  # where an object came from may be gone
            return load_tokenizer(getattr(getattr(model, "config", None), "_name_or_path", None) or None)
        return None
    found = load_tokenizer(tokenizer)
    if found is None and tokenizer is not None:
        raise ConfigError(f"tokenizer={str(tokenizer)!r}: there is no tokenizer of that folder or name")
    return found


class EngineClient:
    """See the module.

    Args:
        model: see `gapless.engine.build.build`.
        config: of the engine.
        tokenizer: a ``transformers`` tokenizer; ``"auto"`` finds the model's own; None for none.
        progress: shows the captures at start; by default a bar, on a terminal.
    """

    def __init__(
        self, model: Any, config: EngineConfig, tokenizer: Any = "auto", progress: Progress | None = None
    ) -> None:
        stop = weakref.WeakMethod(self._on_stop)  # as all that threads come to hold: see `gapless.engine.lifetime`
        self._outputs = OutputProcessor(lambda request_id: None if (ask := stop()) is None else ask(request_id))
        self._messages: queue.SimpleQueue[StepMessage | None] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._groups = OpenGroups()
        self._label = f"{secrets.token_hex(4)}-"  # of requests without one: nobody's own labels begin so
        self.tokenizer = find_tokenizer(model, tokenizer)
        self.sampling_defaults = self._sampling_defaults(model, config)
        built = self._build(model, config, progress or _capture_bar)
        self._built = built
        self.config = built.config
        self.model: Any = built.model
        self._vocab_size = built.model.vocab_size
        self._engine = built.engine
        self._scheduler = built.scheduler
        self._start()

    def _sampling_defaults(self, model: Any, config: EngineConfig) -> dict[str, float]:
        """What `SamplingParams` start from where a request gives nothing."""
        if not config.generation_config:
            return {}
        from gapless.model.load.sampling_defaults import sampling_defaults

        return sampling_defaults(model)

    def default_params(self) -> SamplingParams:
        """Of a request that gives none."""
        return SamplingParams.from_dict(self.sampling_defaults)

    def _build(self, model: Any, config: EngineConfig, progress: Progress) -> Built:
        """The engine and what it was built from; a subclass may bring one that runs elsewhere."""
        from gapless.engine.build import (
            build,  # late: an engine that runs elsewhere needs none of the device's code here
        )

        return build(model, config, self._messages.put, self._outputs.fail, progress=progress)

    def _start(self) -> None:
        from gapless.engine.adapters import LoadedAdapters

        self._life = Lifetime(self._built, self._messages, self._outputs)
        try:
            allowed = self._built.config.allow_missing
            self.adapters = LoadedAdapters(self._engine, self._scheduler, self._built.runner, allowed)
            self._life.start(self)
        except BaseException:
            self._life.close()
            raise

    # ---- requests -------------------------------------------------------------------------------------------------

    def encode(self, prompt: object) -> EncodedPrompt:
        """A prompt as ids, checked."""
        if isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            from gapless.text.prompt_embeds import encode_embeds  # late: it is torch's

            width, dtype = self._built.embeds_width, self._built.model.dtype
            return encode_embeds(prompt, self._vocab_size, width, dtype, self.config.max_prompt_embeds)
        return encode_prompt(prompt, self.tokenizer, self._vocab_size)

    def encode_chat(self, messages: object, **options: Any) -> EncodedPrompt:
        """A conversation as ids, through the tokenizer's chat template, which ``options`` go to."""
        for name in SAMPLING_FIELDS & options.keys():
            raise RequestError(
                f"{name}={options[name]!r} would go to the chat template: give SamplingParams({name}=...)"
            )
        return encode_chat(messages, self.tokenizer, self._vocab_size, **options)

    def submit(self, submissions: Sequence[Submission]) -> list[RequestGroup]:
        """Check all, then hand all to the engine in one turn of its loop. Either all are taken or none.

        Raises:
            RequestError: naming the request and what is wrong with it.
            EngineDeadError, EngineClosedError: no more work is taken.
        """
        self._engine.raise_if_dead()
        for i, submission in enumerate(submissions):
            if submission.lora is not None and isinstance(submission.params, SamplingParams):
                with naming_prompt(i, len(submissions)):
                    self.compile(submission.params)  # now, since it can take seconds, and not within the lock
        with self.adapters.locked([submission.lora for submission in submissions]) as loras:
            return self._submit(submissions, loras)

    def _submit(self, submissions: Sequence[Submission], loras: list[LoraRef | None]) -> list[RequestGroup]:
        requests: list[Request] = []
        groups: list[RequestGroup] = []
        for i, submission in enumerate(submissions):
            with naming_prompt(i, len(submissions)):
                if submission.lora is not None:
                    self.adapters.refuse_unknown(submission.lora)
                made = self._requests(submission, loras[i])
                groups.append(self._group(submission, made))
            requests.extend(made)
        for request, group in zip(requests, (g for g in groups for _ in g.ids), strict=True):
            request.streaming = group.needs_tokens
        for group in groups:
            self._outputs.add(group)
        with self._groups.lock:  # who finds a label can end it: its requests are before the abort in the inbox
            self._groups.add(groups)
            self._engine.submit(requests)
        return groups

    def abort(self, request_id: str) -> None:
        """End every open request with this label; each still gets its final output. Unknown labels are ignored."""
        for group in self._groups.find(request_id):
            self._outputs.abort(group)

    def abort_group(self, group: RequestGroup) -> None:
        """End one request."""
        self._outputs.abort(group)

    def _requests(self, submission: Submission, lora: LoraRef | None) -> list[Request]:
        params, ids, embeds = submission.params, submission.prompt.token_ids, submission.prompt.embeds
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params of type {type(params).__name__} is not allowed: a SamplingParams is")
        if submission.request_id is not None and not isinstance(submission.request_id, str):
            raise RequestError(f"request_id={submission.request_id!r} is not allowed: a string, or None")
        if params.speculative and self.config.speculative is None:
            raise RequestError(
                "speculative=True is not allowed: this engine makes no drafts. Leave it out, or make the engine with "
                "speculative='ngram' or another SpeculativeConfig"
            )
        if embeds is not None:
            if params.prompt_logprobs is not None:
                raise RequestError(
                    f"prompt_logprobs={params.prompt_logprobs} is not allowed for a prompt with prompt_embeds: its "
                    "tokens have no ids. Leave it out"
                )
            ids = embeds.over(ids)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(self._scheduler.longest - len(ids), 1)
            if params.min_tokens > max_tokens:
                raise RequestError(f"min_tokens={params.min_tokens} is more than the {max_tokens} that still fit")
        self._scheduler.refuse_what_never_fits(len(ids), max_tokens)
        check_vocabulary(params, self._vocab_size)
        bad_words = bad_word_ids(params, self.tokenizer, self._vocab_size)
        stops = dict.fromkeys(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(dict.fromkeys(self.model.eos_token_ids))
        if len(stops) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"{len(stops)} ids would end this request, the model's own included; at most {MAX_STOP_TOKEN_IDS} can"
            )
        priority = check_priority(submission.priority)
        key = cache_key(submission.cache_salt, 0 if lora is None else lora.id)
        grammars: list[Any] = [None] * params.n
        if params.structured_outputs is not None:
            grammars = list(self._grammars().grammars(params, tuple(stops), params.n))
        numbers = [next(self._ids) for _ in range(params.n)]
        base = self.derived_seed(numbers[0]) if params.seed is None else params.seed
        return [
            Request(
                id=number,
                prompt_token_ids=ids,
                params=params,
                max_tokens=max_tokens,
                stop_token_ids=tuple(stops),
                seed=(base + i * _SEED_STEP) & _SEED_MASK,
                streaming=False,
                arrival=time.monotonic(),
                bad_words=bad_words,
                prompt_logprobs=None if i else params.prompt_logprobs,
                priority=priority,
                cache_key=key,
                grammar=grammars[i],
                lora=lora,
                embeds=embeds,
            )
            for i, number in enumerate(numbers)
        ]

    def compile(self, params: SamplingParams) -> None:
        """Compile what `submit` would, so that it finds it ready: for threads that must not wait for seconds.

        Raises:
            RequestError: naming the field and what is wrong with it.
        """
        if params.structured_outputs is not None:
            self._grammars().compile(params)

    def _grammars(self) -> GrammarCompiler:
        """Made when the first request needs it: it has a process of its own."""
        life = self._life
        with life.compiling:
            if life.compiler is None:
                self._engine.raise_if_dead()
                life.compiler = GrammarCompiler(self.tokenizer, self._vocab_size, self.model.eos_token_ids)
            return life.compiler

    def derived_seed(self, number: int) -> int:
        """The seed of request ``number`` of this engine if it brings none."""
        digest = hashlib.blake2b(f"{self.config.seed}:{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

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
        self._engine.finish(request_id, FinishReason.ABORT)

    # ---- control --------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Requests that have not had their last output."""
        return self._outputs.pending

    def stats(self) -> tuple[EngineStats, SchedulerStats]:
        """The engine's and the scheduler's counters, as they are now."""
        return self._engine.stats, self._scheduler.snapshot()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; see `LLM.reset_prefix_cache`."""
        self._engine.call(self._scheduler.reset_prefix_cache)

    def prepare_weights(self, weights: Named | None) -> Any:
        """Check new weights, on the thread whose CUDA streams they were made on; see `LLM.update_weights`."""
        self._engine.raise_if_dead()
        return self._built.runner.prepare_weights(weights)

    def update_weights(self, update: Any, *, recompute: bool) -> int:
        """Put checked weights in place; see `LLM.update_weights`. From any thread."""
        if not isinstance(recompute, bool):
            raise ConfigError(f"recompute={recompute!r} is not allowed: True or False")

        def change() -> int:
            self._built.runner.update_weights(update)
            return self._scheduler.new_weights(recompute=recompute)

        return self._engine.alone(change)

    @property
    def weight_version(self) -> int:
        """How often the weights were updated."""
        return self._scheduler.versions.now

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds it."""
        return self._engine.control.paused

    @property
    def is_sleeping(self) -> bool:
        """Whether its memory is given back."""
        return self._engine.control.level > 0

    def pause(self, mode: PauseMode) -> None:
        """See `LLM.pause`. From any thread."""
        pause.pause(self._built, mode)

    def resume(self) -> None:
        """See `LLM.resume`. From any thread."""
        pause.resume(self._built)

    def sleep(self, level: int) -> None:
        """See `LLM.sleep`. From any thread."""
        pause.sleep(self._built, level)

    def wake(self) -> None:
        """See `LLM.wake`. From any thread."""
        pause.wake(self._built)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._life.closed

    def close(self) -> None:
        """Stop the loop; open requests fail with `EngineClosedError`; threads and memory come back."""
        self._life.close()
        self.model = None
