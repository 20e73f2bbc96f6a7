"""Who may have memory: what a scheduler asks its policies when a turn wants some, and which hold yields to it."""

from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from replicas import views
from replicas.policy import AdmissionPolicy, Claimant, PausePolicy

if TYPE_CHECKING:
    from replicas.scheduler import AgentScheduler


def leaves_room(scheduler: "AgentScheduler", admission: AdmissionPolicy | None, request: Request) -> bool:
    """May this waiting turn be admitted beside those that run?"""
    if admission is None or not scheduler.running:
        return True
    share = admission.room_share(views.turn_view(scheduler, request))
    taken = views.load_view(scheduler).running_tokens + request.num_tokens
    return bool(share <= 0 or taken <= (1 - share) * scheduler.facts.capacity_tokens)


def claimant_of(scheduler: "AgentScheduler", request: Request) -> Claimant:
    """As what a turn wants memory."""
    if request.status is RequestStatus.RUNNING:
        return Claimant.RUNNING
    return Claimant.WAITING if scheduler.running else Claimant.STARVED


def yielding(scheduler: "AgentScheduler", pause: PausePolicy, claimant: Claimant, own: str | None) -> str | None:
    """The program whose hold goes first; None: none yields. That of the claimant's ``own`` program goes last."""
    held = ((views.hold_view(scheduler, held), held.key) for held in scheduler.holds)
    ranked = ((key == own, pause.victim_key(view), key) for view, key in held if pause.yields(view, claimant))
    victim = min(ranked, default=None)
    return None if victim is None else victim[2]
