"""When a turn arrived: here, or as whoever stands in front of us says."""

from collections.abc import Mapping

REQUEST_START = "x-request-start"
"""Header by which proxies tell when they got a request: `t=` or not, seconds, milliseconds or microseconds."""

_SCALES = ((1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6))
"""Unix times below the first number are in seconds, and so on; each unit's range begins in 1973."""


def request_start(value: str) -> float | None:
    """Unix time in seconds of such a header's value; None: it makes no sense."""
    try:
        number = float(value.strip().removeprefix("t="))
    except ValueError:
        return None
    return next((number * scale for bound, scale in _SCALES if 0 < number < bound), None)


def waited_s(headers: Mapping[str, str], wall_s: float, limit_s: float) -> float:
    """Seconds that a request waited in front of us.

    Args:
        headers: of the request.
        wall_s: Unix time now. A clock in front of us that is ahead of ours counts as no wait.
        limit_s: a longer wait counts as so long.
    """
    started_s = request_start(headers.get(REQUEST_START, ""))
    return 0.0 if started_s is None else min(max(0.0, wall_s - started_s), limit_s)
