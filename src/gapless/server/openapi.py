"""The OpenAPI document, made from the types that requests are decoded into, and a page that shows it."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import msgspec

from gapless import __version__
from gapless.engine.control import PAUSE_MODES
from gapless.server import protocol, responses_protocol
from gapless.server.errors import ErrorResponse


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        request: type of the body, if there is one.
        response: type of the answer; a text names its media type.
        stream: the answer may be events.
        open: no key is asked for, even where the others need one.
        example: a body.
        query: values that parameters of the query may have.
    """

    method: str
    path: str
    summary: str
    request: Any = None
    response: Any = None
    stream: bool = False
    open: bool = False
    example: dict[str, Any] | None = None
    query: dict[str, tuple[str, ...]] | None = None


_TALK = {"messages": [{"role": "user", "content": "Name three rivers."}]}
OPERATIONS = (
    Operation("get", "/v1/models", "The models that can be named", None, protocol.ModelList),
    Operation("get", "/v1/models/{model}", "One model", None, protocol.ModelCard),
    Operation(
        "post",
        "/v1/completions",
        "Go on from a prompt",
        protocol.CompletionRequest,
        protocol.Completion,
        True,
        example={"prompt": "The three longest rivers are", "max_tokens": 16},
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        protocol.ChatRequest,
        protocol.ChatCompletion,
        True,
        example={**_TALK, "max_tokens": 16},
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer a conversation",
        responses_protocol.ResponsesRequest,
        responses_protocol.ResponseObject,
        True,
        example={"input": "Name three rivers.", "max_output_tokens": 16},
    ),
    Operation(
        "post", "/tokenize", "Text to token ids", protocol.TokenizeRequest, protocol.TokenizeResponse, example=_TALK
    ),
    Operation(
        "post",
        "/detokenize",
        "Token ids to text",
        protocol.DetokenizeRequest,
        protocol.DetokenizeResponse,
        example={"tokens": [3, 4, 5]},
    ),
    Operation("get", "/tokenizer_info", "The tokenizer's special tokens and template", None, dict[str, Any]),
    Operation("get", "/health", "Whether the server lives", None, protocol.Health, open=True),
    Operation("get", "/ready", "Whether the server takes requests", None, protocol.Health, open=True),
    Operation("get", "/ping", "As /health", None, protocol.Health, open=True),
    Operation("post", "/ping", "As /health", None, protocol.Health, open=True),
    Operation("get", "/metrics", "Metrics for Prometheus", None, "text/plain"),
    Operation("get", "/version", "The server's version", None, protocol.Version),
    Operation("get", "/load", "Requests before the engine", None, protocol.Load),
    Operation("get", "/openapi.json", "This document", None, dict[str, Any]),
    Operation("get", "/docs", "This document as a page", None, "text/html"),
)

DEV_OPERATIONS = (
    Operation("post", "/reset_prefix_cache", "Forget all cached prefixes"),
    Operation("post", "/pause", "Hold the engine", query={"mode": PAUSE_MODES}),
    Operation("post", "/resume", "End a pause"),
    Operation("get", "/is_paused", "Whether a pause holds the engine", None, protocol.Paused),
    Operation("post", "/sleep", "Give memory back", query={"level": ("1", "2")}),
    Operation("post", "/wake_up", "End a sleep"),
    Operation("get", "/is_sleeping", "Whether the engine sleeps", None, protocol.Sleeping),
)
"""With ``--dev-routes``."""


def document(
    title: str, *, keys: bool = False, open_paths: frozenset[str] = frozenset(), dev: bool = False
) -> dict[str, Any]:
    """The OpenAPI 3.1 document.

    Args:
        dev: with `DEV_OPERATIONS`.
        keys: the server asks for one, but for `Operation.open` and ``open_paths``.
    """
    operations = OPERATIONS + DEV_OPERATIONS if dev else OPERATIONS
    types = [t for o in operations for t in (o.request, o.response) if t is not None and not isinstance(t, str)]
    schemas, components = msgspec.json.schema_components(
        [*types, ErrorResponse, protocol.ChatChunk], ref_template="#/components/schemas/{name}"
    )
    schema_of = {id(t): s for t, s in zip(types, schemas, strict=False)}
    error_schema, chunk_schema = schemas[-2], schemas[-1]
    paths: dict[str, Any] = {}
    for o in operations:
        answer: dict[str, Any] = {"description": "OK"}
        if isinstance(o.response, str):
            answer["content"] = {o.response: {"schema": {"type": "string"}}}
        elif o.response is not None:
            answer["content"] = {"application/json": {"schema": schema_of[id(o.response)]}}
            if o.stream:
                event = chunk_schema if o.response is protocol.ChatCompletion else schema_of[id(o.response)]
                answer["content"]["text/event-stream"] = {"schema": {"type": "string", "x-event": event}}
        failure = {"description": "An error", "content": {"application/json": {"schema": error_schema}}}
        operation: dict[str, Any] = {
            "summary": o.summary,
            "operationId": f"{o.method}_{o.path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
            "responses": {"200": answer, "4XX": failure, "5XX": failure},
        }
        if o.path in ("/health", "/ready", "/ping"):
            operation["responses"]["503"] = {**answer, "description": "Not now"}
        if keys and (o.open or o.path in open_paths):
            operation["security"] = []
        if o.request is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema_of[id(o.request)], "example": o.example}},
            }
        if o.query is not None:
            operation["parameters"] = [
                {"name": name, "in": "query", "required": False, "schema": {"enum": list(values)}}
                for name, values in o.query.items()
            ]
        if "{model}" in o.path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(o.path, {})[o.method] = operation
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def page(found: dict[str, Any]) -> str:
    """A page without scripts or anything from elsewhere."""
    rows = []
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            kind = body.get("$ref", "").rpartition("/")[2]
            link = f'<a href="#{kind}">{kind}</a>' if kind else ""
            rows.append(
                f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
                f"<td>{html.escape(operation['summary'])}</td><td>{link}</td></tr>"
            )
    parts = []
    for name, schema in found["components"]["schemas"].items():
        fields = "".join(
            f"<tr><td><code>{html.escape(field)}</code></td><td><code>{html.escape(_kind(kind))}</code></td></tr>"
            for field, kind in schema.get("properties", {}).items()
        )
        text = html.escape(schema.get("description", ""))
        parts.append(f'<h3 id="{name}">{name}</h3><p>{text}</p><table>{fields}</table>')
    title = html.escape(found["info"]["title"])
    style = "body{font-family:sans-serif;max-width:60em;margin:2em auto}td{padding:.1em 1em .1em 0;vertical-align:top}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{style}</style>"
        f"<h1>{title} {html.escape(found['info']['version'])}</h1><p><a href=openapi.json>openapi.json</a></p>"
        f"<table>{''.join(rows)}</table><h2>Types</h2>{''.join(parts)}</html>"
    )


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " | ".join(_kind(s) for s in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    if schema.get("type") == "array":
        return f"[{_kind(schema.get('items') or {})}]"
    return str(schema.get("type", "any"))
