"""The output side: text, ids and reasons agree in every mode; each request ends exactly once."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import EngineDeadError, RequestError
from gapless.request.messages import Finished, StepMessage
from gapless.request.outputs import FinishReason, RequestOutput
from gapless.request.sampling_params import SamplingParams
from gapless.text.outputs import OutputProcessor, RequestGroup, accumulate
from text_tokenizers import byte_level, llama_like


def message(
    tokens: Sequence[tuple[int, int]] = (), finished: Sequence[Finished] = (), at: float = 0.0
) -> StepMessage:
    ids = np.array([i for i, _ in tokens], np.int64)
    return StepMessage(ids, np.array([t for _, t in tokens], np.int32), tuple(finished), at)


def end(id: int, tokens: Sequence[int], reason: str = "length", **more: Any) -> Finished:
    return Finished(id, np.array(tokens, np.int32), FinishReason(reason), **more)


def letters(text: str) -> list[int]:
    """One token per character."""
    return [byte_level().convert_tokens_to_ids(c) for c in text]


class Client:
    """A group that records what it gets."""

    def __init__(self, ids: Sequence[int] = (1,), mode: Any = "delta", **params: Any) -> None:
        self.outputs: list[RequestOutput] = []
        self.errors: list[BaseException] = []
        self.group = RequestGroup(
            request_id="label",
            prompt="p",
            prompt_token_ids=np.array([5, 6], np.int32),
            params=SamplingParams(n=len(ids), **params),
            ids=ids,
            on_output=self.outputs.append,
            on_error=self.errors.append,
            tokenizer=byte_level(),
            arrival_time=1.0,
            mode=mode,
        )

    @property
    def total(self) -> RequestOutput:
        """The whole, whatever the mode."""
        if self.group.mode != "delta":
            return self.outputs[-1]
        total = RequestOutput("label", "p", [5, 6])
        for output in self.outputs:
            accumulate(total, output)
        return total

    @property
    def result(self) -> tuple[str, list[int], str | None, int | str | None]:
        """Of the only completion."""
        (c,) = self.total.outputs
        return c.text, c.token_ids, c.finish_reason, c.stop_reason


class Side:
    """A processor and the ids that it wanted stopped."""

    def __init__(self, *clients: Client) -> None:
        self.stopped: list[int] = []
        self.processor = OutputProcessor(self.stopped.append)
        for client in clients:
            self.processor.add(client.group)

    def feed(
        self, tokens: Sequence[tuple[int, int]] = (), finished: Sequence[Finished] = (), at: float = 0.0
    ) -> None:
        self.processor.process(message(tokens, finished, at))


def run(client: Client, tokens: list[int], last: Finished, lag: int = 0) -> Side:
    """One request alone; with ``lag``, steps in flight bring tokens after the processor's stop."""
    side, late = Side(client), 0
    for i, token in enumerate(tokens):
        streamed = [(1, token)] if client.group.needs_tokens else []
        side.feed(streamed, [last] if i == len(tokens) - 1 else [], at=10.0 + i)
        late += bool(side.stopped)
        if late > lag:
            side.feed([], [end(1, tokens[: i + 1], "abort")])
            break
    return side


MODES = ["final", "stream", "delta"]


@pytest.mark.parametrize("mode", MODES)
def test_length(mode: str) -> None:
    client = Client(mode=mode)
    side = run(client, letters("abc"), end(1, letters("abc"), num_preemptions=2))
    assert client.result == ("abc", letters("abc"), "length", None)
    total = client.total
    assert total.finished
    assert total.metrics is not None
    assert (total.request_id, total.prompt, total.prompt_token_ids) == ("label", "p", [5, 6])
    assert (total.metrics.arrival_time, total.metrics.finished_time) == (1.0, 12.0)
    assert total.metrics.num_preemptions == 2
    assert total.metrics.first_token_time == (None if mode == "final" else 10.0)
    assert [o.finished for o in client.outputs] == [False] * (len(client.outputs) - 1) + [True]
    assert len(client.outputs) == (1 if mode == "final" else 3)
    assert side.stopped == []
    assert side.processor.pending == 0


def test_shapes_of_the_modes() -> None:
    stream, delta = Client(mode="stream"), Client(mode="delta")
    for client in (stream, delta):
        run(client, letters("abc"), end(1, letters("abc")))
    assert [o.outputs[0].text for o in stream.outputs] == ["a", "ab", "abc"]
    assert [len(o.outputs[0].token_ids) for o in stream.outputs] == [
        1,
        2,
        3,
    ]  # earlier ones stay as they were
    assert [o.outputs[0].text for o in delta.outputs] == ["a", "b", "c"]
    assert [o.outputs[0].token_ids for o in delta.outputs] == [[t] for t in letters("abc")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_end_tokens_are_in_the_ids_and_not_in_the_text(mode: str, stop: tuple[str, ...]) -> None:
    eos = byte_level().eos_token_id
    (b,) = letters("b")
    cases: list[tuple[dict[str, Any], int, Any]] = [
        ({}, eos, None),
        ({"skip_special_tokens": False}, eos, None),
        ({"stop_token_ids": [b]}, b, b),
    ]
    for params, token, reason in cases:
        client = Client(mode=mode, stop=stop, **params)
        tokens = [*letters("ab"), token]
        run(client, tokens, end(1, tokens, "stop", stop_token=token))
        assert client.result == ("ab", tokens, "stop", reason)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lag", [0, 2])
def test_stop_string(mode: str, lag: int) -> None:
    """Spans tokens; later tokens and the engine's own last word are dropped."""
    client = Client(mode=mode, stop=["cd"])
    tokens = letters("abcdefg")
    side = run(client, tokens, end(1, tokens), lag)
    assert client.result == ("ab", letters("abcd"), "stop", "cd")
    assert side.stopped == [1]
    assert [o.finished for o in client.outputs].count(True) == 1
    assert client.outputs[-1].finished
    assert not any("c" in c.text for o in client.outputs for c in o.outputs)


@pytest.mark.parametrize("mode", MODES)
def test_stop_string_beats_length_and_comes_before_the_end_token(mode: str) -> None:
    client = Client(mode=mode, stop="cd")
    run(client, letters("abcd"), end(1, letters("abcd")))
    assert client.result == ("ab", letters("abcd"), "stop", "cd")
    # a byte run is held until it ends: the stop string shows only when the end token comes
    held = Client(mode=mode, stop="🙂")
    held.group.tokenizer = llama_like()
    run_ids = [llama_like().convert_tokens_to_ids(f"<0x{x:02X}>") for x in "🙂".encode()]
    (x,) = [llama_like().convert_tokens_to_ids("x")]
    tokens = [x, *run_ids, 2]
    run(held, tokens, end(1, tokens, "stop", stop_token=2))
    assert held.result == ("x", tokens[:-1], "stop", "🙂")
    # and its number is that of the token before: too early for this min_tokens
    early = Client(mode=mode, stop="🙂", min_tokens=len(tokens))
    early.group.tokenizer = llama_like()
    run(early, tokens, end(1, tokens, "stop", stop_token=2))
    assert early.result == ("x🙂", tokens, "stop", None)


@pytest.mark.parametrize("mode", MODES)
def test_held_text_is_released_at_the_end(mode: str) -> None:
    client = Client(mode=mode, stop="cdx")
    run(client, letters("abcd"), end(1, letters("abcd")))
    assert client.result == ("abcd", letters("abcd"), "length", None)


def test_stop_strings_work_on_tokens_that_were_not_streamed() -> None:
    client = Client(mode="final", stop="cd")
    side = Side(client)
    side.feed([], [end(1, letters("abcdef"))])
    assert client.result == ("ab", letters("abcd"), "stop", "cd")
    assert side.stopped == []  # the engine has ended it already


def test_abort() -> None:
    clients = [Client(mode=mode) for mode in MODES]
    for client in clients:
        side = Side(client)
        streamed = [(1, t) for t in letters("ab")] if client.group.needs_tokens else []
        for pair in streamed:
            side.feed([pair])
        side.processor.abort(client.group)
        assert side.stopped == [1]
        before = len(client.outputs)
        side.feed([(1, *letters("c"))] if streamed else [])  # a step in flight
        assert len(client.outputs) == before
        side.feed([], [end(1, letters("abc"), "abort")])
        assert len(client.outputs) == before + 1
        assert client.result == ("abc", letters("abc"), "abort", None)
        side.processor.abort(client.group)
        assert side.stopped == [1]
        assert side.processor.pending == 0


def test_error() -> None:
    client = Client()
    side = Side(client)
    side.feed([(1, *letters("a"))])
    side.feed([], [end(1, letters("a"), "error", error="NaN in the logits")])
    assert client.result == ("a", letters("a"), "error", "NaN in the logits")
    assert client.errors == []


@pytest.mark.parametrize("mode", MODES)
def test_n_completions(mode: str) -> None:
    client = Client(ids=(7, 3), mode=mode, stop="z")
    side = Side(client)
    a, b, z = letters("abz")
    side.feed([(3, a), (7, b)])
    side.feed([(3, z), (7, b)])
    assert side.stopped == [3]
    assert side.processor.pending == 1
    side.feed([(3, a), (7, a)])
    side.feed([], [end(7, [b, b, a]), end(3, [a, z, a])])
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in client.total.outputs] == [
        (0, "bba", [b, b, a], "length"),
        (1, "a", [a, z], "stop"),
    ]
    assert [o.finished for o in client.outputs].count(True) == 1
    if mode == "delta":
        assert [[c.index for c in o.outputs] for o in client.outputs] == [[1, 0], [1, 0], [0], [0]]


def test_a_callback_that_raises_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Client(ids=(1,)), Client(ids=(2,))
    calls = []

    def fail(output: RequestOutput) -> None:
        calls.append(output)
        raise KeyError("client bug")

    bad.group.on_output = fail
    side = Side(bad, good)
    a = letters("a")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            side.feed([(1, *a), (2, *a)])
        side.feed([], [end(1, a * 3), end(2, a * 3)])
    assert len(calls) == 1
    assert side.stopped == [1]
    assert [type(e) for e in bad.errors] == [KeyError]
    assert len(caplog.records) == 1
    assert good.result == ("aaa", a * 3, "length", None)
    assert side.processor.pending == 0


def test_a_text_that_cannot_be_taken_harms_no_other() -> None:
    bad, good = Client(ids=(1, 2)), Client(ids=(3,))

    def fail(index: int, text: str, tokens: int) -> bool:
        raise KeyError("client bug")

    bad.group.on_text = fail
    side = Side(bad, good)
    a = letters("a")
    for _ in range(2):
        side.feed([(1, *a), (2, *a), (3, *a)])
    side.feed([], [end(3, a * 2)])
    assert side.stopped == [1, 2]
    assert [type(e) for e in bad.errors] == [KeyError]
    assert bad.outputs == []
    assert good.result == ("aa", a * 2, "length", None)
    assert side.processor.pending == 0


@given(
    texts=st.lists(st.text("abc€", min_size=1, max_size=8), min_size=1, max_size=3),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=1),
    takes=st.lists(st.booleans(), min_size=1, max_size=9),
    width=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_texts_that_are_taken_and_outputs_are_the_whole(
    texts: list[str], stop: list[str], takes: list[bool], width: int
) -> None:
    """What `on_text` takes and what comes as outputs are, in their order, what outputs alone would have been."""
    wholes = []
    for offers in (False, True):
        client, answers, offered = Client(ids=range(len(texts)), stop=stop), itertools.cycle(takes), [0]
        said = [("", 0) for _ in texts]

        def add(index: int, text: str, tokens: int, said: list[tuple[str, int]] = said) -> None:
            said[index] = said[index][0] + text, said[index][1] + tokens

        def take(
            index: int, text: str, tokens: int, add: Any = add, answers: Any = answers, offered: list[int] = offered
        ) -> bool:
            offered[0] += 1
            if taken := next(answers):
                add(index, text, tokens)
            return taken

        def output(output: RequestOutput, client: Client = client, add: Any = add) -> None:
            client.outputs.append(output)
            for c in output.outputs:
                add(c.index, c.text, len(c.token_ids))

        client.group.on_output = output
        client.group.on_text = take if offers else None
        side = Side(client)
        tokens = [byte_level().encode(text, add_special_tokens=False) for text in texts]
        for step in range(0, max(map(len, tokens)), width):
            side.feed([(i, t) for i, ids in enumerate(tokens) for t in ids[step : step + width]])
        side.feed([], [end(i, ids, "abort" if i in side.stopped else "length") for i, ids in enumerate(tokens)])
        assert offered[0] > 0 or not offers or len(side.stopped) == len(texts)
        reasons = {c.index: (c.finish_reason, c.stop_reason) for o in client.outputs for c in o.outputs if c.finished}
        wholes.append((said, reasons, side.processor.pending))
    assert wholes[0] == wholes[1]


@pytest.mark.parametrize("given", [{"mode": "stream"}, {"mode": "final"}, {"logprobs": 1}, {"prompt_logprobs": 1}])
def test_text_alone_is_not_offered_where_more_is_asked_for(given: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"mode": "delta", "ids": [1], "request_id": "r", "prompt": None, "on_output": print}
    own = {name: given[name] for name in given if name != "mode"}
    arguments |= {"prompt_token_ids": np.array([5], np.int32), "params": SamplingParams(**own)}
    arguments |= {"mode": given.get("mode", "delta"), "on_text": lambda index, text, tokens: True}
    assert RequestGroup(**arguments).on_text is None


def test_a_tokenizer_that_raises_harms_no_other() -> None:
    class Broken:
        def push(self, token_id: int, /) -> str:
            raise KeyError(token_id)

        def finish(self) -> str:
            raise KeyError("end")

    first, second, good = Client(ids=(1,)), Client(ids=(2,)), Client(ids=(3,))
    side = Side(first, second, good)
    for bad in (first, second):
        bad.group.completions[0].detokenizer = Broken()
    a = letters("a")
    side.feed([(1, *a), (3, *a)], [end(2, [])])
    side.feed([(1, *a)], [end(1, a), end(3, a)])
    assert [len(c.errors) for c in (first, second, good)] == [1, 1, 0]
    assert side.stopped == [1, 2]
    assert first.outputs == second.outputs == []
    assert good.result == ("a", a, "length", None)
    assert side.processor.pending == 0


def test_engine_death() -> None:
    open_, done = Client(ids=(1, 2)), Client(ids=(3,))
    open_.group.on_error = lambda error: (_ for _ in ()).throw(RuntimeError("client bug"))
    third = Client(ids=(4,))
    side = Side(open_, done, third)
    side.feed([], [end(3, letters("a"))])
    cause = RuntimeError("device lost")
    side.processor.fail(cause)
    side.processor.fail(RuntimeError("again"))
    assert third.errors == [cause]
    assert done.errors == []
    assert side.processor.pending == 0
    side.feed([(1, *letters("a"))], [end(1, letters("a")), end(4, letters("a"))])
    assert third.outputs == []
    with pytest.raises(EngineDeadError) as raised:
        side.processor.add(Client(ids=(9,)).group)
    assert raised.value.__cause__ is cause


def test_failure_during_the_last_output_gives_one_end() -> None:
    client = Client()
    side = Side(client)
    client.group.on_output = lambda output: (client.outputs.append(output), side.processor.fail(KeyError()))[
        0
    ]
    side.feed([], [end(1, letters("a"))])
    assert len(client.outputs) == 1
    assert client.errors == []
    assert side.processor.pending == 0


def test_refused_groups() -> None:
    side = Side(Client(ids=(1,)))
    with pytest.raises(ValueError, match="internal id 1 is in use"):
        side.processor.add(Client(ids=(1,)).group)
    good = Client().group
    kwargs: dict[str, Any] = {
        "request_id": "x",
        "prompt": None,
        "prompt_token_ids": good.prompt_token_ids,
        "on_output": print,
    }
    with pytest.raises(RequestError, match="needs a tokenizer"):
        RequestGroup(params=SamplingParams(stop="a"), ids=[1], **kwargs)
    with pytest.raises(ValueError, match="2 ids for n=1"):
        RequestGroup(params=SamplingParams(), ids=[1, 2], **kwargs)
    with pytest.raises(ValueError, match="mode='all'"):
        RequestGroup(params=SamplingParams(), ids=[1], mode="all", **kwargs)  # type: ignore[arg-type]


def test_without_a_tokenizer_there_are_ids_only() -> None:
    for mode in MODES:
        client = Client(mode=mode)
        client.group.tokenizer = None
        run(client, [7, 8], end(1, [7, 8]))
        assert client.result == ("", [7, 8], "length", None)


def test_a_finished_group_is_freed_without_the_cycle_collector() -> None:
    """A collection would pause the engine's threads."""

    class Sink:
        def __call__(self, output: RequestOutput) -> None:
            pass

    client, sink = Client(stop="z"), Sink()
    client.group.on_output, freed = sink, weakref.ref(sink)
    side = Side(client)
    gc.disable()
    try:
        side.feed([(1, *letters("a"))])
        side.feed([(1, *letters("b"))], [end(1, letters("ab"))])
        del client, sink
        assert freed() is None
    finally:
        gc.enable()


def test_requests_come_from_other_threads() -> None:
    side = Side()
    clients = [Client(ids=(i,)) for i in range(200)]
    threads = [
        threading.Thread(target=lambda part=part: [side.processor.add(c.group) for c in clients[part::4]])
        for part in range(4)
    ]
    a = letters("a")
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        side.feed([(i, *a) for i in range(0, 200, 7)])
    side.feed([], [end(i, a) for i in range(200)])
    assert side.processor.pending == 0
    assert all(c.outputs[-1].finished for c in clients)


@given(
    texts=st.lists(st.text("abc", min_size=1, max_size=10), min_size=1, max_size=3),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 4),
    ended_by_token=st.booleans(),
    lag=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_all_modes_agree_with_the_definition(
    texts: list[str], stop: list[str], min_tokens: int, ended_by_token: bool, lag: int
) -> None:
    """Several completions in lockstep, one token per character: text, ids and reason in every mode."""
    eos = byte_level().eos_token_id
    results = []
    for mode in MODES:
        ids = tuple(range(len(texts)))
        client = Client(ids=ids, mode=mode, stop=stop, min_tokens=min_tokens, max_tokens=None)
        side = Side(client)
        tokens = {i: letters(t) + [eos] * ended_by_token for i, t in enumerate(texts)}
        asked: dict[int, int] = {}
        for step in range(max(map(len, tokens.values()))):
            live = [i for i in ids if step < len(tokens[i]) and step <= asked.get(i, 99) + lag]
            done = [
                end(i, tokens[i], "stop" if ended_by_token else "length", stop_token=eos or None)
                if ended_by_token
                else end(i, tokens[i])
                for i in live
                if step == len(tokens[i]) - 1
            ]
            side.feed([(i, tokens[i][step]) for i in live] if client.group.needs_tokens else [], done)
            for i in side.stopped:
                asked.setdefault(i, step)
        assert side.processor.pending == 0
        assert [o.finished for o in client.outputs].count(True) == 1
        results.append([(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in client.total.outputs])
    want = []
    for text in texts:
        ends = [
            (text.find(s, k) + len(s), text.find(s, k), s)
            for s in stop
            for k in range(len(text))
            if text.find(s, k) >= 0 and text.find(s, k) + len(s) >= min_tokens
        ]
        if ends:
            last, first, string = min(ends)
            want.append((text[:first], letters(text[:last]), "stop", string))
        else:
            reason = "stop" if ended_by_token else "length"
            want.append((text, letters(text) + [eos] * ended_by_token, reason, None))
    assert results == [want] * 3


def test_delta_costs_the_same_however_long_the_output() -> None:
    client = Client(stop="zzz")
    client.group.on_output = lambda output: None
    side, a = Side(client), letters("a")[0]
    one = message([(1, a)])
    best = []
    for _ in range(12):
        start = time.thread_time()
        for _ in range(2000):
            side.processor.process(one)
        best.append(time.thread_time() - start)
    assert min(best[-4:]) < 3 * min(best[:4])
