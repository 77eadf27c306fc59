"""What the applications of all protocols share: health, metrics, and the reading of bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import generate_latest
from starlette.responses import Response

from verl_tool.environments.served.episode import EpisodeLostError, ServedEpisodes
from verl_tool.errors import ToolFault
from verl_tool.http.host_check import HostCheck
from verl_tool.http.messages import RETRY_AFTER, HttpError, JsonResponse
from verl_tool.http.metrics import PROMETHEUS_TEXT, HttpMetrics
from verl_tool.http.request_body import RequestBodies
from verl_tool.http.web_app import HEALTH_PATH, Handler, Request, WebApp
from verl_tool.util.json_text import BadJsonError, decode_request_json


class ServedApp(WebApp):
    """An application in front of a tool server. Its caller starts and closes `episodes`."""

    healthy: ClassVar[str] = "healthy"
    """``status`` of ``/health`` if all is well."""

    def __init__(
        self,
        episodes: ServedEpisodes,
        routes: Sequence[tuple[str, str, Handler]],
        *,
        name: str,
        api_key: str | None,
        host_check: HostCheck | None,
        max_body_bytes: int,
        count_sessions: Callable[[], float] | None = None,
    ) -> None:
        """`count_sessions` gives the number of open sessions; None: that of episodes."""
        self._episodes, self._name = episodes, name
        self._registry = CollectorRegistry()
        gauge = Gauge("verl_tool_sessions", "Open sessions.", registry=self._registry)
        gauge.set_function(count_sessions or episodes.__len__)
        super().__init__(
            [("GET", HEALTH_PATH, self._health), ("GET", "/metrics", self._metrics_text), *routes],
            HttpMetrics(self._registry),
            RequestBodies(max_body_bytes),
            tokens=() if api_key is None else (api_key,),
            host_check=host_check,
        )

    def as_http_error(self, error: Exception) -> HttpError:
        """Map a handler exception to an HTTP error."""
        if isinstance(error, EpisodeLostError):
            return HttpError(503, "unreachable", str(error), headers=RETRY_AFTER)
        return super().as_http_error(error)

    async def _health(self, _: Request) -> Response:
        try:
            report = await self._episodes.client.health()
        except ToolFault as error:
            return JsonResponse({"status": "unhealthy", "message": str(error)}, 503)
        well = report.status == "healthy"
        return JsonResponse({"status": self.healthy if well else "unhealthy"}, 200 if well else 503)

    async def _metrics_text(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=PROMETHEUS_TEXT)


def read_object(request: Request, status: int) -> dict[str, Any]:
    """The JSON object in a request's body. Raises HttpError with `status` if it is something else."""
    try:
        value = decode_request_json(request.body or b"{}")
    except BadJsonError as error:
        raise HttpError(status, "bad_request", str(error)) from None
    if not isinstance(value, dict):
        raise HttpError(status, "bad_request", f"the body is a {type(value).__name__}; send an object")
    return value
