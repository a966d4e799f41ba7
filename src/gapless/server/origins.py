"""Pages of which sites may use the server: browsers name a page's site, and ask before they send what it wants sent."""

from __future__ import annotations

from urllib.parse import urlsplit

from gapless.server.errors import ApiError

MAX_AGE = 600
"""Seconds for which a browser need not ask again."""
EXPOSED = "x-request-id, gapless-warning, retry-after"
_SAFE = ("GET", "HEAD", "OPTIONS")
_PORTS = {"http": ":80", "https": ":443"}


class Origins:
    """Sites of web pages.

    Args:
        allowed: with commas, such as ``https://chat.example``; * for all; None for none but the server's own.
    """

    def __init__(self, allowed: str | None) -> None:
        names = [] if allowed is None else [name.strip().lower().rstrip("/") for name in allowed.split(",")]
        self._all = "*" in names
        self._names = frozenset(names)

    def check(self, method: str, headers: dict[bytes, bytes]) -> None:
        """Raise `ApiError` for a request that a page of another site makes its browser send.

        A page can have some requests sent without being asked first, and cannot read the answer; but to make the
        engine work, or stop, it need not read it.
        """
        if method in _SAFE:
            return
        origin = headers.get(b"origin")
        if origin is None:
            foreign = headers.get(b"sec-fetch-site", b"none") in (b"cross-site", b"same-site")
        else:
            foreign = not self._is_own(origin, headers.get(b"host", b"")) and self.answer_to(headers) is None
        if foreign:
            raise ApiError(
                403,
                "A web page of another site may not use this server; --allowed-origins names those that may.",
                type="permission_error",
                code="origin_not_allowed",
            )

    def answer_to(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]] | None:
        """Headers that let a page read the answer; None if it may not, or no page asks."""
        origin = headers.get(b"origin")
        if origin is None or not (self._all or origin.decode("latin-1").lower() in self._names):
            return None
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED.encode()),
            (b"vary", b"Origin"),
        ]

    def preflight(self, method: str, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]] | None:
        """The answer's headers, if a browser asks whether it may send a request."""
        if method != "OPTIONS" or b"access-control-request-method" not in headers:
            return None
        answer = self.answer_to(headers)
        if answer is None:
            return None
        asked = headers.get(b"access-control-request-headers", b"authorization, content-type")
        return [
            *answer,
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", str(MAX_AGE).encode()),
        ]

    @staticmethod
    def _is_own(origin: bytes, host: bytes) -> bool:
        """The page came from this server."""
        site = urlsplit(origin.decode("latin-1").lower())
        port = _PORTS.get(site.scheme, "")
        return bool(host) and site.netloc.removesuffix(port) == host.decode("latin-1").lower().removesuffix(port)
