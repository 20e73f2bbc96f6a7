"""The cluster below: nodes, processes, Ray Serve and its HTTP front. Needs the scrape of Ray's own ports."""

from cluster.dashboards import foreign as f
from cluster.dashboards.board import Board, Panel, Query, Row, Shape, Unit
from cluster.dashboards.flapping import ended_replicas
from cluster.dashboards.promql import or_zero, per, quantile, rate, total

NODES = Row(
    "Nodes",
    (
        Panel("CPU", "Of each node.", Unit.PERCENT, (Query(total(f.RAY_CPU, by=("ip",), how="max"), "{{ip}}"),)),
        Panel(
            "Memory",
            "Used, of each node's.",
            Unit.SHARE,
            (Query(per(total(f.RAY_MEMORY, by=("ip",)), total(f.RAY_MEMORY_TOTAL, by=("ip",))), "{{ip}}"),),
            bad_from=0.9,
        ),
        Panel("Disk", "Used, of each node's.", Unit.PERCENT, (Query(total(f.RAY_DISK, by=("ip",)), "{{ip}}"),)),
        Panel(
            "Network",
            "All nodes together.",
            Unit.BYTES_PER_S,
            (Query(total(f.RAY_SENT), "sent"), Query(total(f.RAY_RECEIVED), "received")),
        ),
        Panel(
            "GPUs",
            "Utilisation; 0 where there are none.",
            Unit.PERCENT,
            (Query(or_zero(total(f.RAY_GPU, by=("ip", "GpuIndex"), how="max")), "{{ip}} {{GpuIndex}}"),),
        ),
        Panel(
            "GPU memory",
            "In mebibytes, as Ray tells it; 0 where there is none.",
            Unit.COUNT,
            (Query(or_zero(total(f.RAY_GPU_MEMORY, by=("ip", "GpuIndex"), how="max")), "{{ip}} {{GpuIndex}}"),),
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "Memory by component",
            "Resident, all processes of a kind together.",
            Unit.BYTES,
            (Query(total(f.RAY_RSS, by=("Component",)), "{{Component}}"),),
            Shape.STACKED,
        ),
        Panel(
            "CPU by component",
            "100 is one core.",
            Unit.PERCENT,
            (Query(total(f.RAY_COMPONENT_CPU, by=("Component",)), "{{Component}}"),),
            Shape.STACKED,
        ),
        Panel(
            "Actors by state",
            "Of the whole cluster.",
            Unit.COUNT,
            (Query(total(f.RAY_ACTORS, by=("State",)), "{{State}}"),),
        ),
        Panel(
            "Object store",
            "By where the objects are. Requests and answers do not go through it.",
            Unit.BYTES,
            (Query(total(f.RAY_OBJECTS, by=("Location",)), "{{Location}}"),),
        ),
        Panel(
            "Replica processes that ended",
            "Those that were seen in the last half hour and are gone. Once: a crash or a new version. Often: flapping.",
            Unit.COUNT,
            (Query(ended_replicas()),),
            Shape.NUMBER,
            bad_from=3,
        ),
        Panel(
            "Healthy Serve replicas",
            "By deployment.",
            Unit.COUNT,
            (Query(total(f.SERVE_HEALTHY, by=("deployment",)), "{{deployment}}"),),
            Shape.BARS,
        ),
    ),
)

SERVE = Row(
    "Ray Serve",
    (
        Panel(
            "HTTP answers",
            "By status.",
            Unit.PER_S,
            (Query(rate(f.SERVE_REQUESTS, by=("status_code",)), "{{status_code}}"),),
        ),
        Panel(
            "HTTP latency, p95",
            "By route, as the proxy sees it. A stream counts to its end.",
            Unit.MILLISECONDS,
            (Query(quantile(0.95, f.SERVE_LATENCY, by=("route",)), "{{route}}"),),
        ),
        Panel(
            "Requests in the replicas",
            "By deployment.",
            Unit.COUNT,
            (Query(total(f.SERVE_ONGOING, by=("deployment",)), "{{deployment}}"),),
        ),
        Panel(
            "Event loops",
            "How late the loops of Serve's processes run, p99. An ingress whose loop is late needs company.",
            Unit.MILLISECONDS,
            (Query(quantile(0.99, f.SERVE_LOOP, by=("component", "loop_type")), "{{component}} {{loop_type}}"),),
            width=24,
        ),
    ),
)

BOARD = Board(
    "caesura-cluster",
    "Caesura / Cluster (Ray)",
    "Nodes, processes and Ray Serve. Needs the scrape of Ray's own ports.",
    (),
    (NODES, PROCESSES, SERVE),
)
