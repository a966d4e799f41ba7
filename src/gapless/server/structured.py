"""Structured output: the one place where a request's wish for a form becomes the engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapless.errors import RequestError
from gapless.request.structured import StructuredOutputsParams
from gapless.server.errors import bad_request, clip
from gapless.server.protocol import ChatRequest, NamedTool, Sampling, Tool


def structure(request: Sampling) -> dict[str, Any]:
    """Parameters of `SamplingParams` that hold a request's output to its form; empty for free text.

    Raises:
        ApiError: 400, the form is unknown or malformed, or there are two of them. Whether it can be compiled is found
            out later.
    """
    forms: dict[str, Any] = {}
    if (form := _response_format(request.response_format)) is not None:
        forms["response_format"] = form
    if request.structured_outputs is not None:
        forms["structured_outputs"] = request.structured_outputs
    for name in ("json", "regex", "choice", "grammar"):  # older names of the same
        if (value := getattr(request, f"guided_{name}")) is not None:
            forms[f"guided_{name}"] = {name: value}
    if isinstance(request, ChatRequest) and (form := _forced_call(request)) is not None:
        forms.pop("response_format", None)  # says what a text looks like, and this answer is none
        forms["tool_choice"] = form
    if len(forms) > 1:
        raise bad_request(f"{' and '.join(forms)} exclude each other", next(iter(forms)))
    for name, form in forms.items():
        try:
            return {"structured_outputs": StructuredOutputsParams(**form)}
        except RequestError as error:
            text = str(error) if name == "structured_outputs" else f"{name}: {error}"
            raise bad_request(text, name) from error
        except UnicodeEncodeError as error:
            raise bad_request(f"{name} holds half a surrogate pair, which is no text", name) from error
        except TypeError as error:
            raise bad_request(f"{name} has an unknown field: {clip(str(error).rpartition(' ')[2])}", name) from error
    return {}


def _response_format(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    """``response_format``, if it asks for more than text."""
    if asked is None:
        return None
    kind = asked.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise bad_request(
            f"response_format.type={clip(repr(kind))} is not allowed: text, json_object or json_schema",
            "response_format",
        )
    inner = asked.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise bad_request("response_format.json_schema.schema is missing: a JSON schema", "response_format")
    return {"json": schema}


def _forced_call(request: ChatRequest) -> dict[str, Any] | None:
    """The form of an answer that must call a tool: the arguments of one, or a list of calls."""
    choice, tools = request.tool_choice, request.tools or []
    if isinstance(choice, NamedTool):
        for tool in tools:
            if tool.function.name == choice.function.name:
                return {"json": _parameters(tool)}
        raise bad_request(f"tool_choice names {clip(choice.function.name)!r}, and no tool has that name", "tool_choice")
    if choice != "required":
        return None
    if not tools:
        raise bad_request("tool_choice is required, and there are no tools", "tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": _parameters(tool)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    most = {} if request.parallel_tool_calls is not False else {"maxItems": 1}
    return {"json": {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}}


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return tool.function.parameters or {"type": "object", "additionalProperties": False}
