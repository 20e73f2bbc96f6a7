"""What a tenant may use, by the configuration. Who is not in it may use everything."""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, Protocol, TypeVar

from cluster.config import CaesuraConfig
from cluster.program import DEFAULT_TENANT
from cluster.tenant_config import TenantConfig
from cluster.tenant_limits import TenantLimit

NOT_CONFIGURED = TenantConfig()


def kept_apart(body: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """A turn's body with vLLM's `cache_salt`: no tenant's prompt meets what another's left in the prefix cache, as how
    fast it is answered would tell of it.

    A tenant's name has no slash, so that no salt that a client sends is another tenant's. One that is no text is left
    for the replica to refuse.
    """
    own = body.get("cache_salt")
    if own is None:
        return dict(body) if tenant == DEFAULT_TENANT else {**body, "cache_salt": tenant}
    if not isinstance(own, str) or not own:
        return dict(body)
    return {**body, "cache_salt": f"{'' if tenant == DEFAULT_TENANT else tenant}/{own}"}


class Owned(Protocol):
    """A tool."""

    @property
    def owner(self) -> str:
        """The entry of `tools.defined` that it comes from, or the label of a server that a request brings."""
        ...


T = TypeVar("T", bound=Owned)


class Tenants:
    """Looks tenants up.

    Args:
        config: the whole configuration.
    """

    def __init__(self, config: CaesuraConfig) -> None:
        self._tenants: Mapping[str, TenantConfig] = config.tenants
        self._ingresses = config.http.ingress_replicas
        self._defined = config.tools.defined.keys()

    def of(self, tenant: str) -> TenantConfig:
        """What is configured for it."""
        return self._tenants.get(tenant, NOT_CONFIGURED)

    def may_name(self, tenant: str, model: str) -> bool:
        """May it send this as a request's `model`?"""
        allowed = self.of(tenant).models
        return allowed is None or model in allowed

    def tools(self, tenant: str, offered: Iterable[T]) -> list[T]:
        """Those that it may have called. What its request brings is its own."""
        allowed = self.of(tenant).tools
        return [one for one in offered if allowed is None or one.owner in allowed or one.owner not in self._defined]

    def max_programs(self, tenant: str) -> int | None:
        """Server-side programs at a time in one ingress; None: no limit of its own."""
        most = self.of(tenant).max_programs
        return None if most is None else ceil(most / self._ingresses)

    def limits(self) -> dict[str, TenantLimit]:
        """What each may ask of one ingress: an equal part of what it may ask of all."""
        return {
            name: TenantLimit(
                None if tenant.requests_per_s is None else tenant.requests_per_s / self._ingresses,
                ceil(tenant.burst / self._ingresses),
                None if tenant.max_concurrent is None else ceil(tenant.max_concurrent / self._ingresses),
            )
            for name, tenant in self._tenants.items()
        }
