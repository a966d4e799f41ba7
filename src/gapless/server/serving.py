"""What the routes share: the state of the server, the front end, and the steps that every request takes."""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gapless.errors import EngineClosedError, EngineDeadError, RequestError
from gapless.request.outputs import RequestOutput
from gapless.request.sampling_params import SamplingParams
from gapless.server import errors
from gapless.server.frontend import FrontEnd
from gapless.server.limits import read_body
from gapless.server.metrics import Metrics
from gapless.server.options import ServerOptions
from gapless.server.prompts import Prompts
from gapless.server.sse import disconnected
from gapless.server.ticket import Terms, Ticket, answer_of
from gapless.server.tools import form_of_template
from gapless.text.chat import EncodedPrompt
from gapless.text.outputs import OutputMode

T = TypeVar("T")
logger = logging.getLogger("gapless.server")
_encoder = msgspec.json.Encoder()


class State(enum.Enum):
    """Of the server."""

    LOADING = "starting"
    READY = "ok"
    DRAINING = "draining"
    FAILED = "unhealthy"


class Json(Response):
    """A struct as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode it."""
        return _encoder.encode(content)


class Serving:
    """The server's state. `open` is called when the engine is ready.

    Args:
        options: of the server.
        model: as the user named it.
    """

    def __init__(self, options: ServerOptions, model: str) -> None:
        self.options = options
        self.model = model
        self.names = options.model_names(model)
        self.created = int(time.time())
        self.state = State.LOADING
        self.reason: str | None = None
        self.adapters: list[str] = []
        self.metrics = Metrics(options.metrics_prefix, self.names[0])
        self.tool_form = "none"
        self.reasoning = False
        self._front_end: FrontEnd | None = None
        self._prompts: Prompts | None = None
        self._decoders: dict[Any, msgspec.json.Decoder[Any]] = {}

    def open(self, front_end: FrontEnd, prompts: Prompts) -> None:
        """The engine is loaded and warm: take requests."""
        self._front_end, self._prompts = front_end, prompts
        self.adapters = [ref.name for ref in front_end.ready.adapters]
        template = prompts.template
        form, reasoning = self.options.tool_call_parser, self.options.reasoning_parser
        own = form_of_template(template) if prompts.template_has_tools else "hermes"  # as `tool_prompt` writes them
        self.tool_form = own if form == "auto" else form
        self.reasoning = "</think>" in template if reasoning == "auto" else reasoning == "think"
        self.state = State.READY

    @property
    def front_end(self) -> FrontEnd:
        """Of a server that has been ready."""
        if self._front_end is None:
            raise errors.loading()
        return self._front_end

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """Of the model, where a request gives nothing."""
        return self.front_end.ready.sampling_defaults

    @property
    def opened(self) -> FrontEnd | None:
        """The front end, if the server has been ready."""
        return self._front_end

    @property
    def prompts(self) -> Prompts:
        """Of a server that has been ready."""
        if self._prompts is None:
            raise errors.loading()
        return self._prompts

    @property
    def keep_alive(self) -> float | None:
        """Seconds without an event after which a stream gets a comment."""
        return self.options.sse_keep_alive_interval or None

    def raise_unless_ready(self) -> None:
        """Raise what a new request gets in this state."""
        if self.state is State.LOADING:
            raise errors.loading()
        if self.state is State.DRAINING:
            raise errors.draining()
        if self.state is State.FAILED:
            raise errors.engine_failed(f"The engine has stopped: {self.reason}")

    # ---- steps of a request ---------------------------------------------------------------------------------------

    async def read(self, request: Request, kind: type[T]) -> T:
        """The body of a request as a struct, and nothing else of it.

        Raises:
            ApiError: 400, 413, 415, or the server takes no requests.
        """
        self.raise_unless_ready()
        body = await read_body(request, self.options.max_body_bytes)
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.json.Decoder(kind)

        def decode() -> tuple[T, list[str]]:
            try:
                return decoder.decode(body), without_effect(body, kind)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise errors.of_decode_error(error) from error

        found, ignored = await self.prompts.aside(decode)
        no_effect.set(ignored)
        return found

    def model_of(self, name: str | None) -> str:
        """The served name that is meant.

        Raises:
            ApiError: 404.
        """
        if name is None:
            return self.names[0]
        if name not in self.names and name not in self.adapters:
            raise errors.unknown_model(name, [*self.names, *self.adapters])
        return name

    def terms_of(self, model: str, priority: int | None = None, cache_salt: str | None = None) -> Terms:
        """How a request for a served name runs: an adapter's name asks for the adapter."""
        return Terms(priority or 0, cache_salt, model if model in self.adapters else None)

    def max_tokens(self, prompt: EncodedPrompt, asked: int | None, default: int | None) -> int:
        """New tokens of one prompt: what was asked for, which must fit; else the default, as far as it fits.

        Raises:
            ApiError: 400 ``context_length_exceeded``, or a number below 1.
        """
        if asked is not None and asked < 1:
            raise errors.bad_request(f"max_tokens={asked} is not allowed: an integer >= 1", "max_tokens")
        length, longest = len(prompt.token_ids), self.prompts.longest
        if length >= longest or (asked is not None and length + asked > longest):
            raise errors.too_long(length, asked, longest)
        if asked is not None:
            return asked
        room = longest - length
        return room if default is None else min(default, room)

    def submit(
        self,
        prompts: Sequence[EncodedPrompt],
        params: Sequence[SamplingParams],
        mode: OutputMode,
        label: str,
        interval: int | None = None,
        *,
        terms: Terms,
    ) -> Ticket:
        """Hand prompts to the engine, all or none.

        Raises:
            ApiError: why not.
        """
        self.raise_unless_ready()  # again: encoding took time
        step = max(self.options.stream_interval, interval or 1)
        try:
            ticket = self.front_end.submit(prompts, params, mode, label, step, terms)
        except (RequestError, EngineClosedError, EngineDeadError) as error:
            raise answer_of(error) from error
        self.metrics.submitted(params)
        return ticket

    async def final(self, ticket: Ticket, request: Request) -> list[RequestOutput]:
        """All outputs of a ticket, which is closed whatever happens.

        Raises:
            ApiError: it was ended, or a completion failed.
            ClientDisconnect: the client is gone; the engine works on it no more.
        """
        work = asyncio.ensure_future(ticket.all())
        watcher = asyncio.ensure_future(disconnected(request.receive))
        try:
            await asyncio.wait((work, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                ticket.end_reason = ticket.end_reason or "disconnect"
                raise ClientDisconnect
            outputs = work.result()
        finally:
            ticket.close()
            watcher.cancel()
            work.cancel()
        for output in outputs:
            for completion in output.outputs:
                raise_if_failed(completion.finish_reason, completion.stop_reason)
        return outputs


no_effect: ContextVar[Sequence[str]] = ContextVar("no_effect", default=())
"""Fields of the request that this task answers which change nothing; the answer's head names them."""
_NOTHING = (b"null", b"false", b"{}", b"[]", b'""')
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])


def without_effect(body: bytes, kind: type[Any]) -> list[str]:
    """Names of a body's fields that its type does not have, or that change nothing; not those that say nothing."""
    known = frozenset(kind.__struct_fields__) - getattr(kind, "NO_EFFECT", frozenset())
    return [name for name, raw in _top_level.decode(body).items() if name not in known and bytes(raw) not in _NOTHING]


def raise_if_failed(finish_reason: str | None, detail: Any) -> None:
    """An engine that gave up on one completion is an error of the whole request."""
    if finish_reason == "error":
        raise errors.engine_failed(f"The engine could not finish this request: {detail}", retry=False)


def new_id(prefix: str) -> str:
    """``cmpl-`` and 32 hexadecimal digits."""
    return f"{prefix}-{secrets.token_hex(16)}"
