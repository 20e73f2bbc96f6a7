"""Filters: each answers whether a replica comes into question for a turn at all."""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import ClassVar, Protocol

from router.candidate import Arrival, Candidate
from router.rendezvous import ranked
from router.settings import FrontSettings


class Filter(Protocol):
    """Which of the replicas may take the turn? A part of them, in their order; the same for the same arguments."""

    required: ClassVar[bool]
    """True: better none than one that does not pass. False: it is passed over where it would leave none."""
    private: ClassVar[bool]
    """It uses what only this front knows."""

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that pass."""
        ...


class SameModel:
    """Those that serve this router's model, or have not said what they serve."""

    required: ClassVar[bool] = True
    private: ClassVar[bool] = False

    def __init__(self, settings: FrontSettings, model: str | None) -> None:
        self._model = model

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """By the name in their snapshots."""
        model = self._model
        return [one for one in candidates if model is None or one.model is None or one.model == model]


class NotSuspect:
    """Those that have not failed a turn of late."""

    required: ClassVar[bool] = False
    private: ClassVar[bool] = True

    def __init__(self, settings: FrontSettings, model: str | None) -> None:
        pass

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """A replica may be dead for some time before Ray says so."""
        return [one for one in candidates if not one.suspect]


class LargeEnough:
    """Those whose memory takes the program, if all else is gone from it."""

    required: ClassVar[bool] = False
    private: ClassVar[bool] = False

    def __init__(self, settings: FrontSettings, model: str | None) -> None:
        pass

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """By the turn's own length."""
        needed = turn.expected.prompt_tokens + turn.expected.output_tokens
        return [one for one in candidates if needed <= one.facts.kv_tokens]


class TenantsPart:
    """The tenant's part of the replicas: whatever it does, it does to them only."""

    required: ClassVar[bool] = False
    private: ClassVar[bool] = False

    def __init__(self, settings: FrontSettings, model: str | None) -> None:
        self._spread = settings.tenant_spread

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """By rendezvous hashing of the tenant."""
        if self._spread >= 1:
            return list(candidates)
        part = _part(turn.tenant, tuple(one.replica for one in candidates), self._spread)
        return [one for one in candidates if one.replica in part]


class NotDraining:
    """Those that are not on their way out."""

    required: ClassVar[bool] = True
    private: ClassVar[bool] = False

    def __init__(self, settings: FrontSettings, model: str | None) -> None:
        pass

    def keep(self, turn: Arrival, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Nothing new comes to a replica that drains."""
        return [one for one in candidates if not one.draining]


@lru_cache(maxsize=4096)
def _part(tenant: str, replicas: tuple[str, ...], spread: float) -> frozenset[str]:
    return frozenset(ranked(tenant, replicas)[: ceil(spread * len(replicas))])
