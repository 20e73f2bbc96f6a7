"""What a tenant may use, and how much: models, tools, requests. A tenant without configuration may use everything."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol, TypeVar

from cluster.config.schema import CaesuraConfig
from cluster.config.sections import TenantConfig
from cluster.core.clock import Clock
from cluster.core.errors import TooManyRequests
from cluster.core.program import DEFAULT_TENANT

NOT_CONFIGURED = TenantConfig()


def kept_apart(body: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """A turn's body with vLLM's `cache_salt`, so that tenants do not share prefix-cache entries: response times would
    leak what is cached.

    A tenant's name has no slash, so that no salt that a client sends is another tenant's. One that is no text is left
    for the replica to refuse.
    """
    own = body.get("cache_salt")
    if own is None:
        return dict(body) if tenant == DEFAULT_TENANT else {**body, "cache_salt": tenant}
    if not isinstance(own, str) or not own:
        return dict(body)
    return {**body, "cache_salt": f"{'' if tenant == DEFAULT_TENANT else tenant}/{own}"}


TENANT_CONCURRENCY, TENANT_RATE = "tenant_concurrency", "tenant_rate"
"""The error codes of a tenant with too many requests in flight, and of one whose requests come too fast. The proxy
looks for them (`cluster.proxy.load_shedding.RateLimitCache`)."""


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """The limits of one tenant in one ingress. None: no limit."""

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


class Owned(Protocol):
    """A tool."""

    @property
    def owner(self) -> str | None:
        """The entry of `tools.defined` that it comes from, or the label of a server that a request brings."""
        ...


T = TypeVar("T", bound=Owned)


class Tenants:
    """The configuration of tenants, by name.

    Args:
        config: the whole configuration.
    """

    def __init__(self, config: CaesuraConfig) -> None:
        self._tenants: Mapping[str, TenantConfig] = config.tenants
        self._ingresses = config.http.ingress_replicas
        self._defined = config.tools.defined.keys()

    def of(self, tenant: str) -> TenantConfig:
        """Its configuration."""
        return self._tenants.get(tenant, NOT_CONFIGURED)

    def may_name(self, tenant: str, model: str) -> bool:
        """Whether it may use this `model`."""
        allowed = self.of(tenant).models
        return allowed is None or model in allowed

    def tools(self, tenant: str, offered: Iterable[T]) -> list[T]:
        """The tools that it may use. Tools that its request brings are always allowed."""
        allowed = self.of(tenant).tools
        return [one for one in offered if allowed is None or one.owner in allowed or one.owner not in self._defined]

    def max_programs(self, tenant: str) -> int | None:
        """Server-side programs at a time in one ingress; None: no limit of its own."""
        most = self.of(tenant).max_programs
        return None if most is None else ceil(most / self._ingresses)

    def limits(self) -> dict[str, TenantLimit]:
        """Limits of each tenant in one ingress: an equal part of its limits over all ingresses."""
        return {
            name: TenantLimit(
                None if tenant.requests_per_s is None else tenant.requests_per_s / self._ingresses,
                ceil(tenant.burst / self._ingresses),
                None if tenant.max_concurrent is None else ceil(tenant.max_concurrent / self._ingresses),
            )
            for name, tenant in self._tenants.items()
        }


class TenantLimits:
    """Token buckets and concurrency limits of all tenants in one ingress. Pure but for its clock.

    A bucket fills at the tenant's rate up to its burst, and each request takes one token.

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
        """Admit a request; `leave` must follow. None: its tenant has no rate limit.

        Raises:
            TooManyRequests: over a limit; nothing has been taken.
        """
        limit, now_s = self._limits.get(tenant, self._default), self._clock.now_s()
        use = self._used.setdefault(tenant, _Use(float(limit.burst), now_s))
        if limit.max_concurrent is not None and use.in_flight >= limit.max_concurrent:
            message = f"{limit.max_concurrent} requests of this tenant are in flight; retry later"
            raise TooManyRequests(message, code=TENANT_CONCURRENCY, retry_after_s=1)
        allowance = None
        if limit.requests_per_s is not None:
            filled = use.tokens + max(0.0, now_s - use.at_s) * limit.requests_per_s
            use.tokens, use.at_s = min(float(limit.burst), filled), now_s
            if use.tokens < 1:
                wait_s = (1 - use.tokens) / limit.requests_per_s
                raise TooManyRequests(
                    f"more than this tenant's {limit.requests_per_s:g} requests a second; retry later",
                    code=TENANT_RATE,
                    retry_after_s=wait_s,
                )
            use.tokens -= 1
            reset_s = (limit.burst - use.tokens) / limit.requests_per_s
            allowance = Allowance(limit.burst, int(use.tokens), reset_s)
        use.in_flight += 1
        return allowance

    def leave(self, tenant: str) -> None:
        """Record that a request of this tenant has been answered to its last byte."""
        self._used[tenant].in_flight -= 1
