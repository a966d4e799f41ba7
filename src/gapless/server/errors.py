"""What a client is told when something is wrong: OpenAI's shape, one place for codes, nothing of the inside."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.responses import Response

from gapless.errors import RequestError

MAX_MESSAGE = 480
"""Characters of an error's text, so that a bad request is not echoed at length."""
MAX_ECHO = 200
"""Characters of a client's own value in an error."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_PATH = re.compile(r"(?<![\w/.])/(?:[\w.+-]{1,100}/){1,40}[\w.+-]{1,100}")
_FIELD = re.compile(
    r"^(?:prompt \d{1,9}: )?([a-z_]{1,40})(?:\.[a-z_]{1,40})?(?:=|\[|: | holds | has | makes | needs | of type | is )"
)


class ErrorBody(msgspec.Struct):
    """``error`` of an error's JSON. ``code`` is a string where OpenAI has one, else the status."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorResponse(msgspec.Struct):
    """An error's JSON."""

    error: ErrorBody


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for the client; cut and cleaned.
        param: the field that it is about.
        headers: beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | int | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        cut = None if param is None else clip(param)
        self.body = ErrorResponse(ErrorBody(sanitize(message), type, cut, status if code is None else code))

    def json(self) -> bytes:
        """The body."""
        return msgspec.json.encode(self.body)

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.json(), self.status, {"content-type": "application/json", **self.headers})


def clip(text: str, length: int = MAX_ECHO) -> str:
    """The beginning of a text that a client sent."""
    return text if len(text) <= length else text[: length - 1] + "…"


def sanitize(message: str) -> str:
    """Without paths and addresses, and not longer than `MAX_MESSAGE`."""
    if len(message) > MAX_MESSAGE:  # what is allowed stands at the end
        message = message[:MAX_ECHO] + " … " + message[-MAX_ECHO:]
    text = message.encode("utf-8", "replace").decode()
    return _PATH.sub("(path)", _ADDRESS.sub("(address)", text))


def bad_request(message: str, param: str | None = None, code: str | int | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param=param, code=code)


def too_long(prompt_tokens: int, max_tokens: int | None, longest: int, *, at_least: bool = False) -> ApiError:
    """400 with the code that clients look for to shorten a conversation.

    Args:
        at_least: the prompt has not been read: its number of tokens is a lower bound.
    """
    asked = "" if max_tokens is None else f" and max_tokens={max_tokens}, together {prompt_tokens + max_tokens}"
    bound = "at least " if at_least else ""
    return bad_request(
        f"This model's maximum context length is {longest} tokens. The request has {bound}{prompt_tokens} tokens in "
        f"the prompt{asked}. Shorten the prompt{'' if max_tokens is None else ' or lower max_tokens'}.",
        "prompt",
        "context_length_exceeded",
    )


def of_request_error(error: RequestError) -> ApiError:
    """A refusal by the engine's own checks."""
    text = str(error)
    found = _FIELD.match(text)
    param = found[1] if found else None
    if param == "prompt_token_ids":
        param = "prompt"
    return bad_request(text, param)


_AT = re.compile(r" - at `(?:key in )?`?\$\.?(.*?)`$", re.S)


def of_decode_error(error: Exception) -> ApiError:
    """Of a body that is not JSON, or has a field of the wrong type. Only the first fault is named."""
    if isinstance(error, RecursionError):
        return bad_request("The body is nested too deeply.")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"The body is not valid JSON: {text}")
    found = _AT.search(text)
    where = found[1] if found else ""
    return bad_request(text.split(" - at ")[0] + (f" for {clip(where)}" if where else ""), where or None)


def unavailable(message: str, seconds: int = 1, type: str = "ServiceUnavailableError") -> ApiError:
    """503: the same request may succeed later."""
    return ApiError(503, message, type=type, code="overloaded", headers={"retry-after": str(seconds)})


def loading() -> ApiError:
    """503 until the engine is warm."""
    return ApiError(503, "Loading model", type="unavailable_error", headers={"retry-after": "2"})


def draining() -> ApiError:
    """503 once the server has been told to end."""
    return unavailable("The server is shutting down.", 5)


def engine_failed(reason: str, *, retry: bool = True) -> ApiError:
    """500 for a request that the engine could not finish.

    Args:
        retry: whether the same request may succeed elsewhere or later.
    """
    headers = {} if retry else {"x-should-retry": "false"}
    return ApiError(500, reason, type="InternalServerError", headers=headers)


def time_is_up(seconds: float) -> ApiError:
    """408 for a request that took too long; the same one would again."""
    text = f"The request took more than {seconds:g} seconds, which is this server's limit: lower max_tokens."
    return ApiError(408, text, type="timeout_error", headers={"x-should-retry": "false"})


def unknown_model(name: str, known: list[str]) -> ApiError:
    """404."""
    return ApiError(
        404,
        f"The model {clip(name)!r} does not exist. Known: {', '.join(known)}",
        type="invalid_request_error",
        code="model_not_found",
        param="model",
    )


def unsupported(what: str, param: str) -> ApiError:
    """400 for what the interface has and this server has not."""
    return bad_request(f"{what} is not supported.", param)


def event(error: ApiError) -> bytes:
    """The same as an event of a stream that has begun."""
    return b"data: " + error.json() + b"\n\n"


def plain(value: Any) -> str:
    """A client's value in an error, cut."""
    return clip(repr(value))
