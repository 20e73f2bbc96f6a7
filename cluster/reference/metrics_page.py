"""The metrics reference, made from the catalogue."""

from collections.abc import Iterable

from cluster.metrics import Kind, Metric
from cluster.reference.markdown import code, page, table

INTRODUCTION = """Every metric that Caesura exports, as Prometheus knows it: `deploy/prometheus` has scrape
configurations that take off Ray's `ray_` before the names, recording rules and alerts ([runbooks](../runbooks.md));
`deploy/grafana` the dashboards. Labels are enums or names of the configuration, never ids; a tenant that the
configuration does not name is `other`. Ray adds `ReplicaId`, `NodeAddress` and `WorkerId`. Seconds, bytes and tokens
throughout. vLLM's own metrics (`vllm:*`) are exported beside these."""

BUCKETS = "## Buckets\n\nUpper bounds of the histograms, without +Inf."


def metrics_page(catalogue: Iterable[Metric]) -> str:
    """The page."""
    every = tuple(catalogue)
    rows = ((code(one.exported), one.kind.value, ", ".join(map(code, one.labels)), one.text) for one in every)
    histograms = (one for one in every if one.kind is Kind.HISTOGRAM)
    bounds = ((code(one.exported), ", ".join(f"{bound:g}" for bound in one.buckets)) for one in histograms)
    return page(
        "Metrics reference",
        INTRODUCTION,
        table(("metric", "type", "labels", "what it says"), rows),
        BUCKETS,
        table(("metric", "buckets"), bounds),
    )
