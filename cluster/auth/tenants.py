"""The permissions and limits of tenants. A tenant without configuration may use everything and has no limits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from cluster.config.schema import CaesuraConfig
from cluster.config.sections import TenantConfig
from cluster.core.clock import Clock
from cluster.core.errors import TooManyRequests
from cluster.core.program import DEFAULT_TENANT
from cluster.core.tools import ToolId, ToolOffer, ToolSource

NOT_CONFIGURED = TenantConfig()


def kept_apart(body: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """Return a turn's body with vLLM's `cache_salt`, so that tenants do not share entries of the prefix cache.

    Otherwise response times would reveal the content of the cache. A tenant's name has no slash, so that no salt that a
    client sends can be that of another tenant. An invalid salt is not changed, since the replica rejects it.
    """
    own = body.get("cache_salt")
    if own is None:
        return dict(body) if tenant == DEFAULT_TENANT else {**body, "cache_salt": tenant}
    if not isinstance(own, str) or not own:
        return dict(body)
    return {**body, "cache_salt": f"{'' if tenant == DEFAULT_TENANT else tenant}/{own}"}


TENANT_CONCURRENCY, TENANT_RATE = "tenant_concurrency", "tenant_rate"
"""The error codes of a tenant with too many requests in flight, and of one that exceeds its rate. The proxy recognises
them (`cluster.proxy.load_shedding.RateLimitCache`)."""


TENANT_ANSWERS = "tenant_answers"
"""The error code of a request whose number of answers exceeds a limit. A request with fewer may be admitted."""


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """The limits of one tenant in one ingress. None: no limit."""

    requests_per_s: float | None = None
    burst: int = 1
    """Size of the token bucket: the number of requests that may arrive at once after an idle time."""
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Allowance:
    """The rest of a tenant's rate limit after a request, for the headers `x-ratelimit-*` that OpenAI's clients know."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until the token bucket is full."""

    def headers(self) -> dict[str, str]:
        """Return the headers by name."""
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


class Tenants:
    """The configuration of tenants, by name.

    Args:
        config: the whole configuration.
    """

    def __init__(self, config: CaesuraConfig) -> None:
        self._tenants: Mapping[str, TenantConfig] = config.tenants
        self._ingresses = config.http.ingress_replicas

    def of(self, tenant: str) -> TenantConfig:
        """Return the configuration of a tenant. One without an entry gets the defaults."""
        return self._tenants.get(tenant, NOT_CONFIGURED)

    def may_name(self, tenant: str, model: str) -> bool:
        """Return whether the tenant may use this `model`."""
        allowed = self.of(tenant).models
        return allowed is None or model in allowed

    def may_call(self, tenant: str, tool: ToolId | None) -> bool:
        """Return whether the tenant may call this tool. Tools that its own request brings are always allowed."""
        allowed = self.of(tenant).tools
        return tool is not None and (allowed is None or tool.source is ToolSource.REQUEST or tool.entry in allowed)

    def tools(self, tenant: str, offered: Iterable[ToolOffer]) -> list[ToolOffer]:
        """Return the tools that the tenant may call."""
        return [one for one in offered if self.may_call(tenant, one.tool)]

    def max_programs(self, tenant: str) -> int | None:
        """Return the maximum number of the tenant's runs in one ingress; None: the tenant has no limit."""
        most = self.of(tenant).max_programs
        return None if most is None else ceil(most / self._ingresses)

    def limits(self) -> dict[str, TenantLimit]:
        """Return the limits of each tenant in one ingress, which are an equal part of its limits."""
        return {
            name: TenantLimit(
                None if tenant.requests_per_s is None else tenant.requests_per_s / self._ingresses,
                ceil(tenant.burst / self._ingresses),
                None if tenant.max_concurrent is None else ceil(tenant.max_concurrent / self._ingresses),
            )
            for name, tenant in self._tenants.items()
        }


class TenantLimits:
    """Token buckets and concurrency limits of all tenants in one ingress. It has no I/O.

    A bucket fills at the tenant's rate up to its burst, and each request takes one token.

    Args:
        limits: limits by tenant.
        default: the limits of each tenant that is not in ``limits``.
        clock: measures the time in which buckets fill.
    """

    def __init__(self, limits: Mapping[str, TenantLimit], default: TenantLimit, clock: Clock) -> None:
        self._limits = dict(limits)
        self._default = default
        self._clock = clock
        self._used: dict[str, _Use] = {}

    def enter(self, tenant: str) -> Allowance | None:
        """Admit a request, for which `leave` must be called later. Return None if the tenant has no rate limit.

        Raises:
            TooManyRequests: the tenant exceeded a limit. The request does not count.
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

    def add(self, tenant: str, more: int) -> None:
        """Count an admitted request as ``more`` further ones, because it asks for several answers.

        Its rate limit may go into debt, which delays the tenant's next requests.

        Raises:
            TooManyRequests: the tenant would have too many answers in flight. Nothing more counts.
        """
        limit, use = self._limits.get(tenant, self._default), self._used[tenant]
        if limit.max_concurrent is not None and use.in_flight + more > limit.max_concurrent:
            message = f"with {more} more answers of this request, more than {limit.max_concurrent} would be in flight"
            raise TooManyRequests(f"{message}; retry later with fewer", code=TENANT_ANSWERS, retry_after_s=1)
        use.tokens -= more if limit.requests_per_s is not None else 0
        use.in_flight += more

    def leave(self, tenant: str, requests: int = 1) -> None:
        """Record the end of a request that `enter` admitted, which counted as ``requests`` in the end."""
        self._used[tenant].in_flight -= requests
