"""How much one tenant may ask of one ingress: a token bucket of requests, and turns at a time. Pure but for its clock.

The bucket is the usual one: it fills at the tenant's rate up to its burst, and each request takes one token.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.errors import TooManyRequests

AT_ONCE, TOO_FAST = "tenant_concurrency", "tenant_rate"
"""The error's code where a tenant has too many requests in flight, and where they come too fast; the proxy looks for
them (`cluster.http_refused`)."""


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """Of one tenant in one ingress. None: no limit."""

    requests_per_s: float | None = None
    burst: int = 1
    """Requests that may come at once after a quiet time."""
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left after a request, for the headers `x-ratelimit-*` that OpenAI's clients know."""

    limit: int
    remaining: int
    reset_s: float
    """Until the bucket is full."""

    def headers(self) -> dict[str, str]:
        """By name."""
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": f"{self.reset_s:.3f}s",
        }


@dataclass(slots=True)
class _Use:
    tokens: float
    at_s: float
    in_flight: int = 0


class TenantLimits:
    """What tenants use, and whether one more request is within its limits.

    Args:
        limits: by tenant; who is not there has ``default``.
        default: of all others, each its own.
        clock: that buckets fill by.
    """

    def __init__(self, limits: Mapping[str, TenantLimit], default: TenantLimit, clock: Clock) -> None:
        self._limits = dict(limits)
        self._default = default
        self._clock = clock
        self._used: dict[str, _Use] = {}

    def enter(self, tenant: str) -> Allowance | None:
        """A request comes in; `leave` must follow. None: its tenant has no rate.

        Raises:
            TooManyRequests: over a limit; nothing has been taken.
        """
        limit, now_s = self._limits.get(tenant, self._default), self._clock.now_s()
        use = self._used.setdefault(tenant, _Use(float(limit.burst), now_s))
        if limit.max_concurrent is not None and use.in_flight >= limit.max_concurrent:
            message = f"{limit.max_concurrent} requests of this tenant are in flight; retry later"
            raise TooManyRequests(message, code=AT_ONCE, retry_after_s=1)
        allowance = None
        if limit.requests_per_s is not None:
            filled = use.tokens + max(0.0, now_s - use.at_s) * limit.requests_per_s
            use.tokens, use.at_s = min(float(limit.burst), filled), now_s
            if use.tokens < 1:
                wait_s = (1 - use.tokens) / limit.requests_per_s
                raise TooManyRequests(
                    f"more than this tenant's {limit.requests_per_s:g} requests a second; retry later",
                    code=TOO_FAST,
                    retry_after_s=wait_s,
                )
            use.tokens -= 1
            reset_s = (limit.burst - use.tokens) / limit.requests_per_s
            allowance = Allowance(limit.burst, int(use.tokens), reset_s)
        use.in_flight += 1
        return allowance

    def leave(self, tenant: str) -> None:
        """A request of this tenant has been answered, to its last byte."""
        self._used[tenant].in_flight -= 1
