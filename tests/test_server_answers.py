"""What an answer holds beside text: calls of tools and reasoning, however the text is cut into pieces."""

from __future__ import annotations

import gc
import json
import random
import time
from typing import Any

import numpy as np
import pytest

from gapless.request.outputs import CompletionOutput, RequestOutput
from gapless.server.answer import Answer, AnswerForm, Pieces
from gapless.server.chat import Call, _Events
from gapless.server.protocol import ChatRequest
from gapless.server.reasoning import starts_inside
from gapless.server.responses import _Writer, to_chat
from gapless.server.responses_protocol import ResponsesRequest
from gapless.server.tools import form_of_template
from gapless.text.chat import EncodedPrompt

NAMES = frozenset(("weather", "time"))
CALL = '{"name": "weather", "arguments": {"city": "K\\u00f6ln", "days": [1, 2]}}'
OTHER = '{"name": "time", "arguments": {}}'
WEATHER = ("weather", {"city": "Köln", "days": [1, 2]})
TIME = ("time", {})

TOOLS: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", "Just text.", "Just text.", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
    ("hermes", f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}</tool_call>", "Let me see.",
     [WEATHER, TIME]),
    ("hermes", f"<tool_call>{CALL}", "", [WEATHER]),  # the model stopped there
    ("hermes", "a < b <tool <tool_call x", "a < b <tool <tool_call x", []),
    ("hermes", '<tool_call>{"name": </tool_call> after', '<tool_call>{"name": </tool_call> after', []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("hermes", "ends with spaces   ", "ends with spaces   ", []),
    ("llama", '{"name": "weather", "parameters": {"city": "K\\u00f6ln", "days": [1, 2]}}', "", [WEATHER]),
    ("llama", f"<|python_tag|>{CALL}; {OTHER}", "", [WEATHER, TIME]),
    ("llama", "Hello {world}", "Hello {world}", []),
    ("llama", '{"city": "Rome"}', '{"city": "Rome"}', []),
    ("llama", '{"name": "Anna", "age": 7}', '{"name": "Anna", "age": 7}', []),  # no tool has this name
    ("llama", '{"name": "weather", "parameters": {', '{"name": "weather", "parameters": {', []),
    ("llama", "", "", []),
    ("mistral", f"[TOOL_CALLS][{CALL}, {OTHER}]", "", [WEATHER, TIME]),
    ("mistral", f"Wait. [TOOL_CALLS] [{CALL}]", "Wait. ", [WEATHER]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": [1, 2]}[TOOL_CALLS]time[ARGS]{}', "",
     [WEATHER, TIME]),
    ("mistral", '[TOOL_CALLS]time{"a": 1}', "", [("time", {"a": 1})]),
    ("mistral", "[1, 2, [TOOL]", "[1, 2, [TOOL]", []),
    ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
]  # fmt: skip


def pieces_of(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def run(form: AnswerForm, pieces: list[str]) -> Pieces:
    answer, whole = Answer(form), Pieces()
    for i, piece in enumerate(pieces):
        new = answer.push(piece, last=i == len(pieces) - 1)
        whole.reasoning += new.reasoning
        whole.content += new.content
        whole.calls += new.calls
    assert answer.calls == len(whole.calls)
    return whole


@pytest.mark.parametrize(("form", "text", "content", "calls"), TOOLS)
def test_calls(form: str, text: str, content: str, calls: list[Any]) -> None:
    rng = random.Random(text)
    ways = [[text], list(text) or [""], *(pieces_of(text, rng) for _ in range(20))]
    for way in ways:
        found = run(AnswerForm(NAMES, form), way)
        assert found.content == content, way
        assert [(c.function.name, json.loads(str(c.function.arguments))) for c in found.calls] == calls, way
        ids = [c.id for c in found.calls]
        assert len(set(ids)) == len(ids)
        assert all(id is not None and (len(id) == 9 if form == "mistral" else id.startswith("call_")) for id in ids)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "\nhm\n", "Yes."),
        ("hm</think>Yes.", True, "hm", "Yes."),
        ("Yes, <think> is a tag", False, "", "Yes, <think> is a tag"),
        (" \n<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("never ends </thin", True, "never ends </thin", ""),
        ("<thin", False, "", "<thin"),
        ("", False, "", ""),
        ("<think></think>\n", False, "", ""),
    ],
)
def test_reasoning(text: str, inside: bool, reasoning: str, content: str) -> None:
    rng = random.Random(text)
    for way in ([text], list(text) or [""], *(pieces_of(text, rng) for _ in range(20))):
        found = run(AnswerForm(reasoning=True, inside=inside), way)
        assert (found.reasoning, found.content) == (reasoning, content), way


@pytest.mark.parametrize("between", ["", "\n", " and "])
@pytest.mark.parametrize("form", ["hermes", "llama", "mistral"])
def test_calls_of_a_stream_are_numbered_however_they_come(form: str, between: str) -> None:
    """Clients put the pieces of calls together by their index: it goes on from one event to the next."""
    text = {
        "hermes": f"Wait.<tool_call>{CALL}</tool_call>{between}<tool_call>{OTHER}</tool_call>",
        "llama": f"{CALL};{OTHER}",
        "mistral": f"Wait.[TOOL_CALLS][{CALL}, {OTHER}]",
    }[form]
    for way in ([text], list(text), [text[: text.index(OTHER)], text[text.index(OTHER) :]]):
        body = ChatRequest(messages=[], stream=True)
        call = Call("id", "m", 0, body, EncodedPrompt(None, np.array([5], np.int32)), AnswerForm(NAMES, form), None)
        events = _Events(call)
        raw = b""
        for i, piece in enumerate(way):
            last = i == len(way) - 1
            made = CompletionOutput(0, piece, [i], "stop" if last else None)
            raw += events.take({0: RequestOutput("id", None, [5], [made], finished=last)})
        chunks = [json.loads(line[6:])["choices"][0] for line in raw.decode().split("\n\n") if line]
        calls = [found for chunk in chunks for found in chunk["delta"].get("tool_calls") or ()]
        assert [(c["index"], c["function"]["name"]) for c in calls] == [(0, "weather"), (1, "time")], way
        assert len({c["id"] for c in calls}) == 2
        content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        assert content == run(AnswerForm(NAMES, form), way).content
        assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["tool_calls"]


def test_items_of_a_response() -> None:
    """Thoughts, text and a call are three items; the events of the stream add up to them."""
    text = f"<think>hm</think>Wait.<tool_call>{CALL}</tool_call>"
    body = ResponsesRequest(input="x")
    form = AnswerForm(NAMES, "hermes", reasoning=True)
    prompt = EncodedPrompt(None, np.array([5, 6], np.int32))
    call = Call("id", "m", 0, to_chat(body), prompt, form, None)
    writer = _Writer(body, call)
    events = []
    for i, char in enumerate(text):
        piece = CompletionOutput(0, char, [i], "stop" if i == len(text) - 1 else None)
        events += [json.loads(e.split(b"\ndata: ")[1]) for e in writer.take(piece)]
    thought, message, called = writer.response.output
    assert [i.type for i in writer.response.output] == ["reasoning", "message", "function_call"]
    assert (thought.content[0].text, message.content[0].text) == ("hm", "Wait.")  # type: ignore[index,union-attr]
    assert (called.name, json.loads(str(called.arguments))) == WEATHER
    assert writer.response.status == "completed"
    for kind, item in (("output_text", message), ("reasoning_text", thought)):
        whole = "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta")
        assert whole == item.content[0].text  # type: ignore[index,union-attr]
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.done"] == [0, 1, 2]
    assert events[-1]["type"] == "response.completed"


def test_reasoning_and_calls() -> None:
    text = f"<think>which {CALL}?</think>\n<tool_call>{CALL}</tool_call>"
    found = run(AnswerForm(NAMES, "hermes", reasoning=True), list(text))
    assert found.reasoning == f"which {CALL}?"
    assert found.content == ""
    assert len(found.calls) == 1


def test_starts_inside() -> None:
    assert starts_inside("<|im_start|>assistant\n<think>\n")
    assert not starts_inside("<think></think>\n\n")
    assert not starts_inside("")


def test_forms_of_templates() -> None:
    assert form_of_template("... <tool_call> ...") == "hermes"
    assert form_of_template("[TOOL_CALLS]") == "mistral"
    assert form_of_template("{% if role == 'ipython' %}") == "llama"
    assert form_of_template("") == "none"


@pytest.mark.parametrize(
    ("form", "unit"),
    [
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>"),
        ("hermes", " "),
        ("hermes", "<"),
        ("llama", '{"name'),
        ("llama", " "),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[{"),
        ("think", "<think>"),
        ("think", "</thin"),
    ],
)
def test_parsers_are_linear(form: str, unit: str) -> None:
    """Processor time of a text of twice the length is about twice as long, whole and in small pieces."""

    def seconds(size: int, step: int) -> float:
        text = unit * (size // len(unit))
        chosen = AnswerForm(reasoning=True, inside=True) if form == "think" else AnswerForm(NAMES, form)
        gc.collect()
        gc.disable()  # what other tests left would be counted
        start = time.thread_time()
        run(chosen, [text[i : i + step] for i in range(0, len(text), step)])
        end = time.thread_time()
        gc.enable()
        return end - start

    for step in (7, 1 << 20):
        short = max(min(seconds(15_000, step) for _ in range(3)), 1e-3)
        assert min(seconds(60_000, step) for _ in range(2)) < 10 * short
