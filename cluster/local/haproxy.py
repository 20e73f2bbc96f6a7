"""The environment of a local cluster with Ray Serve's HAProxy in front of the ingresses."""

from math import ceil
from pathlib import Path

from cluster.config.schema import CaesuraConfig
from cluster.local.ports import free_ports

ENABLE = "RAY_SERVE_ENABLE_HA_PROXY"
"""Environment variable. `1`: HAProxy is in front of the ingresses. `0`: Ray Serve's own proxy is. Without it, each
ingress listens itself, and an answer makes one hop less."""

BUFFER_SLACK_BYTES = 16 << 10
"""Part of HAProxy's buffer that it keeps free for itself, beside a request's headers."""

END_MARGIN_S = 60
"""Seconds in addition to the longest request for which a HAProxy process that is replaced continues its requests. Ray
replaces it whenever an ingress starts or stops, and by default ends it after 120 s. Ray reuses a port of an ingress
only when no such process can be left."""

LONGEST_END_S = 2_147_483
"""The largest number of seconds that HAProxy accepts here."""


def haproxy_environment(config: CaesuraConfig, directory: str) -> dict[str, str]:
    """Return environment variables, by name.

    Sockets, files and ports are this cluster's own, so that two clusters can share a machine.

    Args:
        config: the configuration.
        directory: the directory of HAProxy's sockets and files. Its path must be short, since a socket's path has at
            most 107 characters.
    """
    place = Path(directory)
    longest_s = ceil(max(config.http.request_timeout_s, config.programs.max_wall_s))
    stats, metrics, fallback_http, fallback_grpc = free_ports(4)
    return {
        ENABLE: "1",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(config.http.max_header_bytes + BUFFER_SLACK_BYTES),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(min(longest_s + END_MARGIN_S, LONGEST_END_S)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(place / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(place / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(place / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(place),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(place / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
    }
