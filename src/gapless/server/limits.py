"""Bodies of bounded size, and the number of files that the process may have open."""

from __future__ import annotations

import contextlib
import resource

from starlette.requests import ClientDisconnect, Request

from gapless.server.errors import ApiError, bad_request

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
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
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
