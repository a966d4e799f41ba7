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
        forced: the whole answer is calls, held to that form: of this tool, or with an empty name of any.
    """

    tools: frozenset[str] = frozenset()
    tool_form: str = "none"
    reasoning: bool = False
    inside: bool = False
    forced: str | None = None

    @classmethod
    def of(cls, serving: Serving, body: ChatRequest) -> AnswerForm:
        """Of a request's answers, as far as it is known before the prompt."""
        if isinstance(body.tool_choice, NamedTool):
            return cls(forced=body.tool_choice.function.name)
        if body.tool_choice == "required":
            return cls(forced="")
        names = frozenset[str]()
        if body.tools and body.tool_choice != "none" and serving.tool_form != "none":
            names = frozenset(tool.function.name for tool in body.tools)
        # What is held to a form has no room for thoughts.
        free = body.structured_outputs is None and (body.response_format or {}).get("type", "text") == "text"
        return cls(names, serving.tool_form, free and serving.reasoning and body.include_reasoning is not False)

    def for_prompt(self, prompt: str) -> AnswerForm:
        """The same, now that the prompt's text is known."""
        return dataclasses.replace(self, inside=self.reasoning and starts_inside(prompt[-64:]))

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
        if self._tools is not None:
            new.content, new.calls = self._tools.push(new.content)
            if last:
                rest, calls = self._tools.finish()
                new.content += rest
                new.calls += calls
        self.calls += len(new.calls)
        return new
