"""The direct data plane's environment: what Ray reads when it is imported, and what its HAProxy is started with."""

import math
import socket
from pathlib import Path

from cluster.config.schema import CaesuraConfig

BUFFER_SLACK_BYTES = 16 << 10
"""Of HAProxy's buffer, beside a request's headers and body: what HAProxy keeps free for itself."""

ROUTER_TIMEOUT_S = 5
"""HAProxy waits so long for the router's answer, beside the time for which a program may wait to be admitted."""


def direct_environment(config: CaesuraConfig, directory: str) -> dict[str, str]:
    """Environment variables, by name.

    HAProxy's buffer holds the largest request that is accepted: what says whose turn it is may stand at a body's end.
    Sockets, files and ports are this cluster's own, so that two clusters can share a machine.

    Args:
        config: what is served.
        directory: where HAProxy's sockets and files go; a short path, for a socket's has at most 107 characters.
    """
    http, place = config.http, Path(directory)
    wait_s = 0.0 if config.placement is None else config.placement.max_wait_s
    stats, metrics, fallback_http, fallback_grpc = free_ports(4)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(
            http.max_body_bytes + http.max_header_bytes + BUFFER_SLACK_BYTES
        ),
        "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S": str(ROUTER_TIMEOUT_S + math.ceil(wait_s)),
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


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all different."""
    listeners = [socket.socket() for _ in range(count)]
    try:
        for listener in listeners:
            listener.bind(("", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
