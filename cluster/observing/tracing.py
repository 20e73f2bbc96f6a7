"""Selects how a process traces its turns: not at all, or with OpenTelemetry."""

from cluster.config.schema import CaesuraConfig
from cluster.observing.trace_context import NullTraces, Traces


def traces(config: CaesuraConfig, part: str) -> Traces:
    """Make the `Traces` that the configuration selects.

    Args:
        config: the whole configuration.
        part: the role of this process, such as ``ingress``.
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
