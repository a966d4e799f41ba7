"""From `StructuredOutputsParams` to matchers. Runs on the threads of callers, never on the loop's.

A grammar that is new goes to a worker process first (`gapless.grammar.worker`), which compiles it and tries it out
under the same limits. What takes too long there, too much memory, or crashes the library, is killed with the process
and refused; the engine's process compiles only what has passed. Both answers are remembered.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gapless.errors import EngineClosedError, RequestError
from gapless.grammar.forms import drops_a_space, grammar_text
from gapless.grammar.matcher import I32, Grammar, brief
from gapless.grammar.tokenizer_spec import grammar_spec
from gapless.request.sampling_params import SamplingParams
from gapless.request.structured import StructuredOutputsParams

CHECK_SECONDS = 3.0
"""A grammar that needs longer is refused."""
START_SECONDS = 60.0
"""For the worker to read the tokenizer; about one second for the largest."""
CACHE_BYTES = 64 * 2**20
"""Estimated size of the compiled grammars, and of refusals, that are remembered."""
_BASE_COST, _COST_PER_CHARACTER = 2**16, 64

LIMITS: dict[str, Any] = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 25_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
"""Of ``llguidance``, in the worker and in the engine: a half to a tenth of its defaults. With these the dearest mask
that was found took 0.2 s of one core, and its request ended there; ``\\p{L}{1000}`` and a choice of 10000 still pass.
A state of the lexer takes 1 to 2 kB, so a matcher stays below some 100 MB."""


def available() -> bool:
    """Whether ``llguidance`` is installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return False
    return True


class GrammarCompiler:
    """See the module. For one tokenizer; any thread may call it.

    Args:
        tokenizer: a fast ``transformers`` tokenizer.
        vocab_size: the model's; ids beyond the tokenizer's are never allowed.
        eos_token_ids: the model's ends. They are allowed where the grammar may end.

    Raises:
        RequestError: ``llguidance`` is missing, or cannot serve this tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not available():
            raise RequestError("structured_outputs needs the package llguidance: pip install 'gapless[structured]'")
        if backend is None:
            what = "there is none" if tokenizer is None else f"{type(tokenizer).__name__} is none"
            raise RequestError(f"structured_outputs needs a fast tokenizer, and {what}")
        import llguidance

        self._mask_words = -(-vocab_size // 32)
        self._ends = [token for token in eos_token_ids if token < vocab_size]
        own = getattr(tokenizer, "eos_token_id", None)
        ends = self._ends or [own if isinstance(own, int) and own < vocab_size else vocab_size - 1]
        self._never = () if self._ends else tuple(ends)  # the library wants one; nobody may draw it
        spec = json.loads(backend.to_str())
        self._special = {token["content"]: token["id"] for token in spec["added_tokens"] if token["id"] < vocab_size}
        self._drops_a_space = drops_a_space(tokenizer)
        options: dict[str, Any] = {
            "tokenizer": json.dumps(grammar_spec(spec, vocab_size, ends)),
            "vocab_size": vocab_size,
            "eos_token_ids": ends,
            "limits": LIMITS,
        }
        try:
            self._tokenizer = llguidance.LLTokenizer(options["tokenizer"], n_vocab=vocab_size, eos_token=ends)
        except Exception as error:
            raise RequestError(f"structured_outputs: this tokenizer is not supported: {brief(str(error))}") from error
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._worker = Worker(options)
        self._known: OrderedDict[str, Any] = OrderedDict()  # grammar -> a matcher at its start, or why there is none
        self._cost = 0
        self._lock = threading.Lock()  # of these two; never held for long
        self._compiling = threading.Lock()

    def grammars(self, params: SamplingParams, stop_token_ids: Sequence[int], count: int) -> list[Grammar]:
        """One `Grammar` for each of ``count`` completions.

        Raises:
            RequestError: naming the field, and what is wrong with it.
        """
        start = self.compile(params)
        keep = self._keep(params, stop_token_ids)
        return [Grammar(start.deep_copy(), keep, tuple(self._ends)) for _ in range(count)]

    def compile(self, params: SamplingParams) -> Any:
        """The matcher at its start, which nobody may move: copies are moved."""
        asked = params.structured_outputs
        assert isinstance(asked, StructuredOutputsParams)
        text = grammar_text(asked, self._special, drops_a_space=self._drops_a_space)
        found = self._recall(text)
        if found is None:
            with self._compiling:  # one at a time: the worker is one, and a second request for the same finds it here
                found = self._recall(text)
                if found is None:
                    found = self._worker.check(text) or self._build(text)
                    self._remember(text, found)
        if isinstance(found, str):
            raise RequestError(f"structured_outputs.{asked.kind} is not allowed: {found}")
        return found

    def _build(self, text: str) -> Any:
        import llguidance

        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        matcher.compute_bitmask()  # the first is the dearest: what it finds out, the copies have
        return brief(matcher.get_error()) if matcher.is_error() else matcher

    def _recall(self, text: str) -> Any:
        with self._lock:
            if text in self._known:
                self._known.move_to_end(text)
            return self._known.get(text)

    def _remember(self, text: str, found: Any) -> None:
        with self._lock:
            self._known[text] = found
            self._cost += _cost(text)
            while self._cost > CACHE_BYTES and len(self._known) > 1:
                self._cost -= _cost(self._known.popitem(last=False)[0])

    def _keep(self, params: SamplingParams, stop_token_ids: Sequence[int]) -> I32 | None:
        forbidden = [*self._never, *(token for token in self._ends if token not in stop_token_ids)]
        allowed = params.allowed_token_ids
        if not forbidden and allowed is None:
            return None
        bits = np.full(32 * self._mask_words, allowed is None, np.bool_)
        if allowed is not None:
            bits[list(allowed)] = True
        bits[forbidden] = False
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def _cost(text: str) -> int:
    return _BASE_COST + _COST_PER_CHARACTER * len(text)


class Worker:
    """The process, started at once and again after each time that it had to be killed. One caller at a time."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._first = json.dumps(options)
        self._closed = False
        self._ready = False  # it has read the tokenizer
        self._start()

    def check(self, grammar: str) -> str:
        """What is wrong with the grammar; empty if nothing is."""
        try:
            if not self._ready:
                self._ready = self._answer(START_SECONDS) is not None
            if not self._ready:
                return "the process that compiles grammars does not start"
            self._write(json.dumps(grammar))
            answer = self._answer(CHECK_SECONDS)
            if answer is not None:
                return brief(answer)
            why = "compiling it needs too much memory"
        except queue.Empty:
            why = f"compiling it takes more than {CHECK_SECONDS} s"
        except OSError as error:
            why = f"the process that compiles it ended: {error}"
        if self._closed:
            raise EngineClosedError("the engine is closed")
        self._stop()
        self._start()
        return why

    def _start(self) -> None:
        self._ready = False
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))]
        self._process = subprocess.Popen(  # a session of its own: it does not get this program's interrupts
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        threading.Thread(target=self._talk, args=(self._process, self._lines), daemon=True).start()

    def _talk(self, process: subprocess.Popen[bytes], lines: queue.SimpleQueue[str]) -> None:
        """Hand over the tokenizer, then bring the answers; an empty line is the end."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(self._first.encode() + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                lines.put(line.decode())
        except (OSError, ValueError):
            pass  # it has been killed
        lines.put("")
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, seconds: float) -> str | None:
        """None when the process has ended.

        Raises:
            queue.Empty: it is late.
        """
        line = self._lines.get(timeout=seconds)
        return str(json.loads(line)) if line else None

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it; a check that waits for it is refused."""
        self._closed = True
        self._stop()
