"""Configuration of what is told of a cluster beside its metrics: traces and logs."""

from typing import Literal

from pydantic import Field

from cluster.config_section import Section


class TracingConfig(Section):
    """Traces of programs, by OpenTelemetry: one a program, with spans for turns, their queueing, holds and tools."""

    otlp_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Where spans go: the whole URL of an OTLP/HTTP receiver, such as http://collector:4318/v1/traces. None: nothing is
    traced. Headers for it are read from OTEL_EXPORTER_OTLP_HEADERS."""
    sample_ratio: float = Field(1.0, ge=0, le=1)
    """The part of the programs that is traced. Turns that come with a `traceparent` are traced if that says so."""


class LogsConfig(Section):
    """What the cluster's processes log."""

    format: Literal["text", "json"] = "text"
    """`json`: one object a line, with the ids of the program, the turn's request and the model where there are any."""
