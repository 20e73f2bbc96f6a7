"""Free ports of this machine for servers that start later."""

import random
import socket
from pathlib import Path

RAY_WORKERS_END = 20_000
"""Ray gives its workers the ports from 10,002 to this one."""
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
ATTEMPTS = 200
ANY = ""


def free_ports(count: int, host: str = ANY) -> list[int]:
    """Return ports of an address that nobody listens on now; all different.

    Linux takes the ports of outgoing connections from one range. The returned ports are outside it where that is
    possible, because a connection could otherwise take a port before its server listens on it.

    Raises:
        OSError: no port is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listeners: list[socket.socket] = []
    try:
        while len(listeners) < count:
            listeners.append(_listener(host, family))
        return [int(listener.getsockname()[1]) for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()


def _listener(host: str, family: socket.AddressFamily) -> socket.socket:
    for port in (*_candidates(), 0):
        listener = socket.socket(family)
        try:
            listener.bind((host, port))
        except OSError:
            listener.close()
            if port == 0:
                raise
        else:
            return listener
    raise AssertionError("the last candidate is any port")


def _candidates() -> list[int]:
    try:
        first_outgoing = int(OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []
    room = range(RAY_WORKERS_END, first_outgoing)
    return random.sample(room, min(ATTEMPTS, len(room)))
