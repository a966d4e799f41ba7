"""Bodies of bounded size, and the number of files that the process may have open."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from contextvars import ContextVar

from starlette.requests import ClientDisconnect, Request

from gapless.server.errors import ApiError, bad_request

MAX_VALUES = 2_000_000
"""Commas in a body: about as many values, or more. Objects cost memory and time that bytes do not show."""
SMALL_BODY = 1 << 16
"""A larger one is read and checked beside the event loop."""
body_size: ContextVar[int] = ContextVar("body_size", default=0)
"""Bytes of the body of the request that this task answers."""
RESERVED_FILES = 64
"""Descriptors that are not for connections."""


def raise_file_limit(max_connections: int) -> int:
    """Raise the soft limit of open files as far as needed and allowed; returns the connections that it leaves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + RESERVED_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY:
        return max_connections
    return max(min(max_connections, soft - RESERVED_FILES), 1)


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request.

    Raises:
        ApiError: 413; 415, it is not said to be JSON.
        ClientDisconnect: the client is gone.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):  # a page of another site cannot send that unasked
        raise ApiError(415, "The body must be JSON: Content-Type: application/json.", code="unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limit:
        await _discard(request, 2 * limit)
        raise _too_large(limit)
    parts, size = list[bytes](), 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body = message.get("body", b"")
        size += len(body)
        if size > limit:
            if message.get("more_body", False):
                await _discard(request, 2 * limit)
            raise _too_large(limit)
        parts.append(body)
        if not message.get("more_body", False):
            break
    if not size:
        raise bad_request("The body is empty: a JSON object is needed.")
    values = 0
    for part in parts:
        for at in range(0, len(part), SMALL_BODY):
            values += part.count(b",", at, at + SMALL_BODY)
        if len(part) > SMALL_BODY:
            await asyncio.sleep(0)
    if values > MAX_VALUES:
        raise bad_request(f"The body holds about {values} values; at most {MAX_VALUES} are allowed.")
    body_size.set(size)
    return b"".join(parts)


async def _discard(request: Request, most: int) -> None:
    """Read on for a while: a client that is still sending when the connection is closed does not see the answer."""
    while most > 0:
        message = await request.receive()
        most -= max(len(message.get("body", b"")), 1)
        if not message.get("more_body", False):
            return


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The body has more than {limit} bytes.", code="request_too_large", headers={"connection": "close"}
    )
