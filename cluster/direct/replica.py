"""A replica in the direct data plane: a `ProgramServer` with an HTTP surface of its own."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.api.ray_errors import as_http_error
from cluster.api.sse import Answers
from cluster.core.clock import MonotonicClock
from cluster.direct.http_app import http_app
from cluster.direct.note import ROUTER_DEPLOYMENT
from cluster.direct.turn_reports import Ended, TurnReports
from cluster.observing.slo_tracker import SloTracker
from replicas.server import ProgramServer

REPORT_TIMEOUT_S = 5.0
"""A report of turns that the router has not taken by then is sent again later."""


class DirectProgramServer(ProgramServer):
    """The deployment class of a replica to which HAProxy forwards requests."""

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve: what this replica serves on a port of its own."""
        router = serve.get_deployment_handle(ROUTER_DEPLOYMENT, serve.get_replica_context().app_name)
        streams = router.options(stream=True)

        async def report(ended: Ended, under_way: Sequence[str] | None) -> None:
            answers = router.broadcast("turns", self.replica_id, ended, under_way)
            await answers.results_async(timeout_s=REPORT_TIMEOUT_S)

        def relay(method: str, body: dict[str, Any], headers: dict[str, str], identity: str) -> Answers:
            answers: Answers = streams.answers.remote(method, body, headers, identity)
            return answers

        reports = TurnReports(report)
        tracker = SloTracker.for_ingresses(self._config, MonotonicClock(), self._config.replicas.count)
        tracker.open()
        return http_app(self._config, self.answer, relay, self.ready, reports, as_http_error, tracker)
