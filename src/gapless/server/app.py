"""The ASGI application: routes, and what stands before all of them (keys, hosts, request ids, errors, the log)."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless import __version__
from gapless.errors import RequestError
from gapless.server import chat, completions, errors, openapi, responses
from gapless.server.dev_routes import DevRoutes
from gapless.server.errors import ApiError
from gapless.server.keys import Keys
from gapless.server.logs import request_id
from gapless.server.metrics import CONTENT_TYPE
from gapless.server.origins import Origins
from gapless.server.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    Health,
    Load,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    Version,
)
from gapless.server.serving import Json, Serving, State, no_effect

logger = logging.getLogger("gapless.server")

OPEN_PATHS = frozenset(("/health", "/ready", "/ping"))
"""Paths that ask for no key. Every other one does, those that do not exist included."""
QUIET_PATHS = frozenset(("/health", "/ready", "/ping", "/metrics", "/version", "/load"))
"""Paths that the access log leaves out."""
MISSING = {
    "embeddings": "makes no embeddings",
    "score": "scores no pairs of texts",
    "rerank": "ranks no texts",
    "pooling": "pools no hidden states",
    "classify": "classifies no texts",
    "moderations": "moderates no texts",
    "audio": "hears and speaks nothing",
    "images": "makes no images",
    "files": "keeps no files",
    "batches": "keeps no batches; `gapless generate --file` works through a file of requests",
    "fine_tuning": "trains nothing",
    "load_lora_adapter": "loads adapters at its start only, by --lora NAME=PATH",
    "unload_lora_adapter": "keeps the adapters that it was started with",
}
"""Routes of other servers, by the first word after ``/v1``: what this one does not do."""
_QUOTED = re.compile(r"'[^']{24,}'|\"[^\"]{24,}\"")
_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
MAX_NAMED = 20
"""Fields without effect that an answer's head names."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}\Z")


def make_app(serving: Serving, keys: Keys, hosts: frozenset[str] | None) -> ASGIApp:
    """The whole application.

    Args:
        serving: the server's state.
        keys: one of which every request needs, but for `OPEN_PATHS`.
        hosts: names that the Host header may have; None allows all.
    """
    routes = _Routes(serving, keys)
    router = Router(
        [
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/responses", routes.responses, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/tokenizer_info", routes.tokenizer_info),
            Route("/health", routes.health),
            Route("/ping", routes.health, methods=["GET", "POST"]),
            Route("/ready", routes.ready),
            Route("/metrics", routes.metrics),
            Route("/version", routes.version),
            Route("/load", routes.load),
            Route("/openapi.json", routes.openapi),
            Route("/docs", routes.docs),
            *(DevRoutes(serving).routes() if serving.options.dev_routes else ()),
        ],
        redirect_slashes=False,
    )
    return Gate(router, serving, keys, hosts)


def _answer(scope: Scope, error: ApiError | RequestError | HTTPException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return errors.of_request_error(error)
    first = scope["path"].removeprefix("/v1").strip("/").partition("/")[0]
    missing = f"There is no {errors.clip(scope['path'])}"
    missing += f": this server {MISSING[first]}." if first in MISSING else "; /docs lists what there is."
    text = {404: missing, 405: f"{scope['method']} is not allowed here."}
    return ApiError(
        error.status_code,
        text.get(error.status_code, error.detail),
        code="not_found" if error.status_code == 404 else None,
        headers=dict(error.headers or {}),
    )


class Gate:
    """Stands before the routes. Plain ASGI, so that a client's end is seen behind it."""

    def __init__(self, app: ASGIApp, serving: Serving, keys: Keys, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._serving = serving
        self._keys = keys
        self._hosts = hosts
        self._origins = Origins(serving.options.allowed_origins)
        self._open = OPEN_PATHS | ({"/metrics"} if serving.options.public_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or a websocket, which is refused."""
        if scope["type"] == "lifespan":
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = dict(scope["headers"])
        label = headers.get(b"x-request-id", b"").decode("latin-1")
        if not _REQUEST_ID.match(label):
            label = secrets.token_hex(16)
        token = request_id.set(label)
        start, status = time.perf_counter(), 0
        no_effect.set(())
        readable = self._origins.answer_to(headers) or []

        async def send_labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                fields = [name for name in no_effect.get() if _FIELD.match(name)][:MAX_NAMED]
                if fields:
                    readable.append((b"gapless-warning", b"without effect: " + ", ".join(fields).encode()))
                own = (b"x-request-id", label.encode("latin-1"))
                message["headers"] = [*message.get("headers", ()), own, *readable]
            await send(message)

        try:
            try:
                self._check_host(headers)
                if (granted := self._origins.preflight(scope["method"], headers)) is not None:
                    readable = []
                    await send_labelled({"type": "http.response.start", "status": 204, "headers": granted})
                    await send_labelled({"type": "http.response.body"})
                    return
                self._origins.check(scope["method"], headers)
                self._check_key(scope, headers)
                scope["app"] = self  # so that the router raises what it has no route for
                await self._app(scope, receive, send_labelled)
            except (ApiError, RequestError, HTTPException) as error:
                answer = _answer(scope, error)
                if answer.status == 400:
                    text = answer.body.error.message  # without what the client's texts say
                    logger.info("refused: %s", errors.plain(_QUOTED.sub("'…'", text))[1:-1])
                await answer.response()(scope, receive, send_labelled)
            except ClientDisconnect:
                pass
            except Exception:
                logger.exception("a request failed")
                if status:
                    raise  # the answer has begun: the connection is dropped
                failure = errors.engine_failed("This request failed on the server; its log says why.")
                await failure.response()(scope, receive, send_labelled)
        finally:
            self._note(scope, status or 499, time.perf_counter() - start)
            request_id.reset(token)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if self._hosts is not None and not self._known_host(headers.get(b"host", b"")):
            raise ApiError(
                403,
                "This server is not known by the name in the Host header; --allowed-hosts names it.",
                type="permission_error",
                code="unknown_host",
            )

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._keys and scope["path"] not in self._open and not self._keys.allow(headers.get(b"authorization")):
            raise ApiError(
                401,
                "A valid API key is needed: Authorization: Bearer KEY.",
                type="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _known_host(self, header: bytes) -> bool:
        host = header.decode("latin-1").lower()
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        return self._hosts is None or name in self._hosts

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"]
        known = scope.get("endpoint") is not None
        route = scope["route"].path if known and "route" in scope else (path if known else "other")
        self._serving.metrics.http(scope["method"] if known else "other", route, status, seconds)
        if self._serving.options.access_log and path not in QUIET_PATHS:
            client = scope.get("client") or ("-",)
            path = errors.clip(path)
            path = path if path.isprintable() else errors.plain(path)  # a line of the log stays one line
            logger.info(
                "%s %s %s %d %.3f s",
                client[0],
                scope["method"],
                path,
                status,
                seconds,
                extra={"fields": {"status": status, "seconds": seconds, "path": path}},
            )


class _Routes:
    """One method for each route."""

    def __init__(self, serving: Serving, keys: Keys) -> None:
        self._serving = serving
        self._keys = keys
        self._document: dict[str, Any] | None = None

    # ---- text -----------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Any:
        return await completions.create(self._serving, request)

    async def chat(self, request: Request) -> Any:
        return await chat.create(self._serving, request)

    async def responses(self, request: Request) -> Any:
        return await responses.create(self._serving, request)

    async def tokenize(self, request: Request) -> Response:
        serving = self._serving
        body = await serving.read(request, TokenizeRequest)
        serving.model_of(body.model)
        ids, names = await serving.prompts.tokenize(body)
        return Json(TokenizeResponse(len(ids), serving.prompts.longest, ids, names))

    async def detokenize(self, request: Request) -> Response:
        serving = self._serving
        body = await serving.read(request, DetokenizeRequest)
        serving.model_of(body.model)
        return Json(DetokenizeResponse(await serving.prompts.detokenize(body.tokens)))

    async def tokenizer_info(self, request: Request) -> Response:
        tokenizer = self._serving.prompts.tokenizer
        if tokenizer is None:
            raise ApiError(404, "This server has no tokenizer.", code="not_found")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        found: dict[str, Any] = {name: getattr(tokenizer, name, None) for name in names}
        found |= {f"{name}_id": getattr(tokenizer, f"{name}_id", None) for name in names}
        found["tokenizer_class"] = type(tokenizer).__name__
        found["chat_template"] = getattr(tokenizer, "chat_template", None)
        found["vocab_size"] = self._serving.prompts.vocab_size
        found["max_model_len"] = self._serving.prompts.longest
        return Json(found)

    # ---- models ---------------------------------------------------------------------------------------------------

    def _card(self, name: str) -> ModelCard:
        serving = self._serving
        parent = serving.names[0] if name in serving.adapters else None
        return ModelCard(name, serving.created, serving.names[0], serving.prompts.longest, parent=parent)

    async def models(self, request: Request) -> Response:
        return Json(ModelList([self._card(name) for name in (*self._serving.names, *self._serving.adapters)]))

    async def model(self, request: Request) -> Response:
        return Json(self._card(self._serving.model_of(request.path_params["model"])))

    # ---- operation ------------------------------------------------------------------------------------------------

    def _health(self) -> Health:
        serving = self._serving
        front_end = serving.opened
        if front_end is None:
            return Health(serving.state.value, reason=serving.reason)
        stalled = front_end.stalled()
        engine, _ = front_end.client.stats()
        health = Health(serving.state.value, round(stalled, 3), engine.in_flight, serving.reason)
        if serving.state is not State.FAILED and stalled > serving.options.hang_timeout:
            health.status = "unhealthy"
            health.reason = f"the engine has work and has made no step for {stalled:.0f} seconds"
        return health

    async def health(self, request: Request) -> Response:
        health = self._health()
        return Json(health, 503 if health.status == "unhealthy" else 200)

    async def ready(self, request: Request) -> Response:
        health = self._health()
        ready = health.status == "ok"
        return Json(health, 200 if ready else 503, headers=None if ready else {"retry-after": "1"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._serving.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return Json(Version(__version__))

    async def load(self, request: Request) -> Response:
        front_end = self._serving.opened
        return Json(Load(0 if front_end is None else len(front_end.tickets)))

    async def openapi(self, request: Request) -> Response:
        return Json(self._openapi())

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(openapi.page(self._openapi()))

    def _openapi(self) -> dict[str, Any]:
        if self._document is None:
            public = frozenset({"/metrics"} if self._serving.options.public_metrics else ())
            self._document = openapi.document(
                "gapless", keys=bool(self._keys), open_paths=public, dev=self._serving.options.dev_routes
            )
        return self._document
