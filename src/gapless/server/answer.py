"""One answer of a model, in pieces: its reasoning, its text, its calls of tools."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gapless.server.protocol import ChatRequest, NamedTool, ToolCall
from gapless.server.reasoning import ReasoningSplitter, starts_inside
from gapless.server.tools import FORMS, ForcedParser, ToolParser

if TYPE_CHECKING:
    from gapless.server.serving import Serving


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer may hold beside text.

    Attributes:
        tools: names of the tools that may be called; none are looked for without.
        tool_form: in which form.
        reasoning: what stands between the tags is split off.
        inside: the prompt has opened the tag.
        show_reasoning: and handed on, or else left out.
        max_calls: later ones are left out; None for no limit.
        forced: the whole answer is calls, held to that form: of this tool, or with an empty name of any.
    """

    tools: frozenset[str] = frozenset()
    tool_form: str = "none"
    reasoning: bool = False
    inside: bool = False
    show_reasoning: bool = True
    max_calls: int | None = None
    forced: str | None = None

    @classmethod
    def of(cls, serving: Serving, body: ChatRequest) -> AnswerForm:
        """Of a request's answers, as far as it is known before the prompt."""
        most = 1 if body.parallel_tool_calls is False else None
        if isinstance(body.tool_choice, NamedTool):
            return cls(forced=body.tool_choice.function.name)
        if body.tool_choice == "required":
            return cls(forced="", max_calls=most)
        names = frozenset[str]()
        if body.tools and body.tool_choice != "none" and serving.tool_form != "none":
            names = frozenset(tool.function.name for tool in body.tools)
        # What is held to a form has no room for thoughts.
        guided = (body.structured_outputs, body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
        free = all(form is None for form in guided) and (body.response_format or {}).get("type", "text") == "text"
        return cls(
            names,
            serving.tool_form,
            free and serving.reasoning,
            show_reasoning=body.include_reasoning is not False,
            max_calls=most,
        )

    def for_prompt(self, prompt: str, continued: str = "") -> AnswerForm:
        """The same, now that the prompt's text is known, and that of the message that the answer goes on with."""
        return dataclasses.replace(self, inside=self.reasoning and starts_inside(prompt[-64:], continued))

    @property
    def is_plain(self) -> bool:
        """The answer is its text."""
        return not (self.tools or self.reasoning or self.forced is not None)

    @property
    def needs_special_tokens(self) -> bool:
        """The marks of the form are special tokens, which a text leaves out by default."""
        return bool(self.tools) and self.tool_form in ("llama", "mistral")


@dataclass(slots=True)
class Pieces:
    """What is new."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class Answer:
    """Takes the text of one answer as it comes."""

    def __init__(self, form: AnswerForm) -> None:
        self._reasoning = ReasoningSplitter(form.inside) if form.reasoning else None
        self._tools: ToolParser | None = FORMS[form.tool_form](form.tools) if form.tools else None
        if form.forced is not None:
            self._tools = ForcedParser(form.forced or None)
        self.calls = 0
        self._show_reasoning = form.show_reasoning
        self._max_calls = form.max_calls
        self.is_plain = form.is_plain

    def push(self, text: str, *, last: bool) -> Pieces:
        """What ``text`` adds; with ``last`` also what was held back."""
        new = Pieces(content=text)
        if self._reasoning is not None:
            new.reasoning, new.content = self._reasoning.push(text)
            if last:
                thought, rest = self._reasoning.finish()
                new.reasoning += thought
                new.content += rest
            if not self._show_reasoning:
                new.reasoning = ""
        if self._tools is not None:
            new.content, new.calls = self._tools.push(new.content)
            if last:
                rest, calls = self._tools.finish()
                new.content += rest
                new.calls += calls
        if self._max_calls is not None:
            new.calls = new.calls[: self._max_calls - self.calls]
        self.calls += len(new.calls)
        return new
