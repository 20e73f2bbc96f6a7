"""Queries a running server through its HTTP routes, and keeps the answer or the error of each route."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.auth.keys import KEY_VARIABLE, client_headers
from cluster.core.clock import Clock
from cluster.observing.catalogue import PREFIX

TIMEOUT_S = 10.0
ROUTES = {
    "health": "/health",
    "ready": "/ready",
    "version": "/version",
    "models": "/v1/models",
    "programs": "/v1/programs?limit=20",
    "statistics": "/admin/statistics",
    "router": "/admin/router",
    "predictor": "/admin/predictor",
    "metrics": "/metrics",
}
"""The queried paths by their names in a `Look`."""


WANTS_KEY = f"401: it wants an API key; set {KEY_VARIABLE}"


class NoServer(Exception):
    """The server cannot be reached, is not Caesura's, or needs another key. The message is one line."""


Sample = tuple[str, tuple[tuple[str, str], ...]]
"""Identifies a series of a metric: its name and its labels."""


@dataclass(frozen=True, slots=True)
class Look:
    """The answers of a server at one time."""

    at_s: float
    answers: Mapping[str, Any] = field(default_factory=dict)
    """Decoded responses, by the names of `ROUTES`."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Reasons for missing answers, by the names of `ROUTES`."""
    samples: Mapping[Sample, float] = field(default_factory=dict)
    """Values of Caesura's counters and gauges by series."""

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of all samples of this name with these labels; None if there are none."""
        wanted = set(labels.items())
        found = [value for (sample, its), value in self.samples.items() if sample == name and wanted <= set(its)]
        return sum(found) if found else None

    @property
    def has_metrics(self) -> bool:
        """Whether the server answered with its metrics."""
        return "metrics" not in self.errors

    def replicas(self) -> list[Mapping[str, Any]]:
        """Return the statistics of each replica that reported them."""
        answer = self.answers.get("statistics")
        replicas = answer.get("replicas") if isinstance(answer, dict) else None
        return [replica for replica in replicas or [] if isinstance(replica, dict)]

    def routers(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the state of this ingress's router by model."""
        answer = self.answers.get("router")
        models = answer.get("models", {}) if isinstance(answer, dict) else {}
        return {name: view for name, view in models.items() if isinstance(view, dict)}


async def look(client: httpx.AsyncClient, clock: Clock) -> Look:
    """Query all routes at the same time.

    Raises:
        NoServer: the server cannot be used.
    """
    at_s = clock.now_s()
    responses = await asyncio.gather(*(_ask(client, path) for path in ROUTES.values()), return_exceptions=True)
    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}
    samples: dict[Sample, float] = {}
    for name, answer in zip(ROUTES, responses, strict=True):
        if isinstance(answer, httpx.HTTPError | httpx.InvalidURL | ValueError):
            errors[name] = str(answer) or type(answer).__name__
        elif isinstance(answer, BaseException):
            raise answer
        elif name == "metrics" and answer.is_success:
            samples = _samples(answer.text)
        elif answer.is_success:
            answers[name] = answer.json()
        else:
            errors[name] = _why(answer)
    if "health" in errors:
        raise NoServer(errors["health"])
    if errors.get("version") == WANTS_KEY:
        raise NoServer(WANTS_KEY)
    if not isinstance(answers.get("version"), dict) or "caesura" not in answers["version"]:
        raise NoServer("it answers, but not as Caesura does")
    return Look(at_s, answers, errors, samples)


def client_of(url: str) -> httpx.AsyncClient:
    """Make an HTTP client, with the API key of the environment if there is one.

    Raises:
        NoServer: the URL is invalid.
    """
    try:
        # The user chooses the server. Certificates are checked as httpx does by default.
        return httpx.AsyncClient(base_url=url.rstrip("/"), headers=client_headers(), timeout=TIMEOUT_S)
    except (httpx.InvalidURL, ValueError) as error:
        raise NoServer(str(error)) from error


async def _ask(client: httpx.AsyncClient, path: str) -> httpx.Response:
    answer = await client.get(path)
    if answer.is_success and not path.startswith("/metrics"):
        answer.json()
    return answer


def _why(answer: httpx.Response) -> str:
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        return WANTS_KEY
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def _samples(text: str) -> dict[Sample, float]:
    """Parse the text format of metrics. Invalid lines do not prevent the rest from being shown."""
    found: dict[Sample, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.name.startswith(PREFIX) and family.type != "histogram":
                for sample in family.samples:
                    found[sample.name, tuple(sorted(sample.labels.items()))] = float(sample.value)
    except ValueError:
        return found
    return found
