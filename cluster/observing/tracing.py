"""Chooses how a process traces its turns: not at all, or as OpenTelemetry spans."""

from cluster.config.schema import CaesuraConfig
from cluster.observing.trace_context import NullTraces, Traces


def traces(config: CaesuraConfig, part: str) -> Traces:
    """The traces that the configuration asks for.

    Args:
        config: the whole configuration.
        part: what this process is, such as ``ingress``.
    """
    endpoint = config.tracing.otlp_endpoint
    if endpoint is None:
        return NullTraces()
    # OpenTelemetry takes long to import, and most processes do not need it.
    from cluster.observing.spans import OpenTelemetryTraces, otlp_exporter

    idle_s = config.limits.program_ttl_s
    return OpenTelemetryTraces(
        otlp_exporter(endpoint), part=part, sample_ratio=config.tracing.sample_ratio, idle_s=idle_s
    )
