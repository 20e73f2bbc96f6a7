"""Decides whose body is read next, and when: tenants take turns, and long work of one tenant delays the others little.

Reading a body, and what follows it in the event loops of the ingress and of the replica, lets nobody else run for a
while. Work of ``s`` seconds that comes once in ``p`` seconds delays all other requests by ``s**2 / (2 * p)`` on
average (the Pollaczek-Khinchine formula for a server that is mostly idle). A tenant therefore waits ``p`` seconds after
a body that is costly for its size, so that this mean is at most `ADDED_S`. It does not wait while it is the only
tenant, or for bodies as agents send them, however long their messages are.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

ADDED_S = 0.00025
"""Largest mean delay in seconds that the bodies of one tenant may add to the requests of the others."""
AFTERWARDS = 3.0
"""Work in the event loops after a body was accepted, as a multiple of the CPU time of its reading. Measured with
wide bodies (`benchmarks.flood`): 1.4 to 3.7."""
USUAL_S = 12e-9
"""CPU seconds of reading a byte for which no tenant waits. Requests of agents with 30 to 1,500 messages and 20 tools
took 3.6 to 5.7e-9, and the costly bodies of `benchmarks.flood` 20 to 32e-9."""
ACTIVE_S = 10.0
"""Seconds after its last request for which a tenant counts as active."""
MAX_WAIT_S = 30.0
"""Maximum expected wait of a body. Others are rejected."""

Job = TypeVar("Job")


@dataclass(slots=True)
class _Tenant(Generic[Job]):
    waiting: deque[Job] = field(default_factory=deque)
    ready_s: float = 0.0
    """When its next body may be read."""
    pause_s: float = 0.0
    """How long it waits after a body like its last one."""


class BodyShares(Generic[Job]):
    """The bodies that wait, by tenant. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant[Job]] = OrderedDict()
        """The tenants whose bodies wait, or that may not go on yet. The first is the next."""
        self._last: tuple[str, float] | None = None
        self._last_other: tuple[str, float] | None = None
        """The last request, and the last one of another tenant than that."""

    def seen(self, tenant: str, now_s: float) -> None:
        """Notice a request of a tenant, whatever its body is."""
        if self._last is not None and self._last[0] != tenant:
            self._last_other = self._last
        self._last = (tenant, now_s)

    def wait_s(self, tenant: str, now_s: float) -> float:
        """Return how long another body of the tenant is expected to wait."""
        known = self._tenants.get(tenant)
        if known is None or self._others_until_s(tenant) <= now_s:
            return 0.0
        return max(0.0, known.ready_s - now_s) + len(known.waiting) * known.pause_s

    def add(self, tenant: str, job: Job) -> None:
        """Let a body wait for its turn."""
        self._tenants.setdefault(tenant, _Tenant()).waiting.append(job)

    def take(self, now_s: float) -> tuple[str, Job] | None:
        """Return the body whose turn it is, which then no longer waits. None: none waits, or none may be read yet."""
        for name, tenant in list(self._tenants.items()):
            if tenant.waiting and self._ready_s(name) <= now_s:
                self._tenants.move_to_end(name)
                return name, tenant.waiting.popleft()
            if not tenant.waiting and tenant.ready_s <= now_s:
                del self._tenants[name]
        return None

    def next_s(self, now_s: float) -> float | None:
        """Return how long to wait before `take` may find a body that waits. None: no body waits."""
        waits = [self._ready_s(name) - now_s for name, tenant in self._tenants.items() if tenant.waiting]
        return max(0.0, min(waits)) if waits else None

    def charge(self, tenant: str, now_s: float, cpu_s: float, size: int, *, is_accepted: bool) -> None:
        """Let a tenant wait for a body that was read just now, if it took longer than usual.

        Args:
            tenant: whose body it was.
            now_s: the time.
            cpu_s: the CPU time of reading it.
            size: its size in bytes.
            is_accepted: whether work follows.
        """
        work_s = max(0.0, cpu_s - size * USUAL_S) * (1 + AFTERWARDS * is_accepted)
        charged = self._tenants.setdefault(tenant, _Tenant())
        self._tenants.move_to_end(tenant)  # after those that came while it was read
        charged.pause_s = work_s**2 / (2 * ADDED_S)
        charged.ready_s = now_s + charged.pause_s

    def _ready_s(self, tenant: str) -> float:
        """Return when the next body of a tenant may be read, if no other tenant sends anything until then."""
        return min(self._tenants[tenant].ready_s, self._others_until_s(tenant))

    def _others_until_s(self, tenant: str) -> float:
        """Return until when another tenant counts as active."""
        last = self._last_other if self._last is not None and self._last[0] == tenant else self._last
        return -inf if last is None else last[1] + ACTIVE_S
