"""Routes that stop, empty and free the engine, named as vLLM's; only with ``--dev-routes``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gapless.server.protocol import Paused, Sleeping
from gapless.server.serving import Json

if TYPE_CHECKING:
    from gapless.server.serving import Serving


class DevRoutes:
    """One method for each route. A request takes as long as what it asks for."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/is_paused", self.is_paused),
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake_up, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping),
        ]

    async def _act(self, action: str, argument: str = "") -> Response:
        await self._serving.front_end.act(action, argument)
        return Response()

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget all cached prefixes."""
        return await self._act("reset_prefix_cache")

    async def pause(self, request: Request) -> Response:
        """``mode``: keep, abort or finish."""
        return await self._act("pause", request.query_params.get("mode", "abort"))

    async def resume(self, request: Request) -> Response:
        """End a pause."""
        return await self._act("resume")

    async def is_paused(self, request: Request) -> Response:
        """Whether it holds."""
        return Json(Paused(self._serving.front_end.paused))

    async def sleep(self, request: Request) -> Response:
        """``level``: 1 or 2."""
        return await self._act("sleep", request.query_params.get("level", "1"))

    async def wake_up(self, request: Request) -> Response:
        """End a sleep."""
        return await self._act("wake")

    async def is_sleeping(self, request: Request) -> Response:
        """Whether it sleeps."""
        return Json(Sleeping(self._serving.front_end.sleep_level > 0))
