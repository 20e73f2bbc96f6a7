"""Selects the model of a request: the one that it names, or one by the rules of the class that it names."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote, unquote

from cluster.api.openai import no_model
from cluster.config.models import CLASS_PREFIX, ClassRule
from cluster.config.schema import CaesuraConfig
from cluster.core.program import ProgramIdentity
from cluster.core.replica_snapshot import Home
from cluster.dispatch.placed_calls import prompt_tokens
from router.model_choice import Chosen, TurnFacts, choose_model

MAX_PROGRAMS = 100_000
"""Largest number of programs whose model is remembered. The store knows the others."""
SWEEPS = 4
"""The choice of a program in use is renewed at least this often within its expiry."""
SWEEP_S = 60.0
"""And at least this often, to find out whether the store has another choice."""


class Loads(Protocol):
    """The load of the models."""

    def start_s(self) -> Mapping[str, float | None]:
        """Return by model the expected seconds until a turn starts. None: there is no replica."""
        ...


class Homes(Protocol):
    """A `PlacementStore`. Here the value of a program and class is a model instead of a replica."""

    async def claim(self, key: str, home: Home) -> Home | None:
        """Propose a home. Return the home that is valid, or None if the store does not answer."""
        ...

    async def touch(self, homes: Mapping[str, Home]) -> frozenset[str] | None:
        """Renew the expiry of homes. Return the keys that have another home or none, or None if there is no answer."""
        ...


class ModelSelection:
    """Selects the models of programs. A program stays with the model that was chosen for its class, on every ingress.

    Args:
        config: the whole configuration.
        loads: the load of the models.
        homes: the store of the choices of all ingresses.
    """

    def __init__(self, config: CaesuraConfig, loads: Loads, homes: Homes) -> None:
        self._served = config.served
        self._adapters = config.adapters
        self._default = config.model.id
        self._classes = config.model_routing
        self._loads = loads
        self._homes = homes
        self._chosen: OrderedDict[str, str] = OrderedDict()
        self._used: set[str] = set()
        """The keys that were used since the last sweep."""
        self._sweep_s = min(SWEEP_S, config.limits.program_ttl_s / SWEEPS)
        self._choosing: dict[str, asyncio.Task[str]] = {}
        self.counters: dict[Chosen, int] = dict.fromkeys(Chosen, 0)

    def check(self, model: str | None) -> None:
        """Check that a model, or a class, of this name exists. None: the request named nothing, which is valid.

        Raises:
            BadRequest: it does not exist (status 404).
        """
        if model is None or model in self._served or model in self._adapters:
            return
        name = model.removeprefix(CLASS_PREFIX)
        if name == model or name not in self._classes:
            raise no_model(model)

    async def model_of(self, body: Mapping[str, Any], identity: ProgramIdentity | None) -> str:
        """Return the id of the model that a request is for.

        Args:
            body: the body of the request. Its `model` has been checked.
            identity: the identity of the turn, or None if the request is no turn.
        """
        named = body.get("model")
        if named is None:
            return self._default
        if named in self._served:
            return str(named)
        if named in self._adapters:
            return self._adapters[named]
        name = str(named).removeprefix(CLASS_PREFIX)
        if identity is None or identity.key is None:
            return self._choose(self._classes[name], body, identity)
        key = f"{name}/{identity.key}"
        if key not in self._chosen:
            if key not in self._choosing:
                self._choosing[key] = asyncio.create_task(self._agree(key, name, body, identity))
            self._remember(key, await asyncio.shield(self._choosing[key]))
        self._chosen.move_to_end(key)
        self._used.add(key)
        return self._chosen[key]

    async def attend(self) -> None:
        """Renew the choices of programs in use before they expire in the store. Never returns."""
        while True:
            await asyncio.sleep(self._sweep_s)
            await self.sweep()

    async def sweep(self) -> None:
        """Renew the choices that were used since the last sweep. Where the store has another one, that one is valid."""
        used, self._used = self._used, set()
        homes = {key: _home(model) for key in used if (model := self._chosen.get(key)) is not None}
        others = await self._homes.touch(homes) if homes else frozenset()
        if others is None:
            self._used |= homes.keys()
            return
        for key in others:
            held = await self._homes.claim(key, homes[key])
            if held is None:
                self._used.add(key)
            elif key in self._chosen and (agreed := unquote(held.replica)) in self._served:
                self._chosen[key] = agreed

    async def _agree(self, key: str, name: str, body: Mapping[str, Any], identity: ProgramIdentity) -> str:
        """Return the model that is chosen here, or the one that another ingress has chosen before."""
        try:
            model = self._choose(self._classes[name], body, identity)
            held = await self._homes.claim(key, _home(model))
            agreed = model if held is None else unquote(held.replica)
            return agreed if agreed in self._served else model
        finally:
            del self._choosing[key]

    def _choose(self, rules: tuple[ClassRule, ...], body: Mapping[str, Any], identity: ProgramIdentity | None) -> str:
        choice = choose_model(rules, turn_facts(body, identity), self._loads.start_s())
        self.counters[choice.reason] += 1
        return choice.model

    def _remember(self, key: str, model: str) -> None:
        self._chosen[key] = model
        while len(self._chosen) > MAX_PROGRAMS:
            self._chosen.popitem(last=False)


def _home(model: str) -> Home:
    return Home(quote(model, safe=""), 1)


def turn_facts(body: Mapping[str, Any], identity: ProgramIdentity | None) -> TurnFacts:
    """Return the facts about a request that rules use.

    Chat completions have a tool's name in `function`, and responses have it beside the type.
    """
    names: set[str] = set()
    offered = body.get("tools")
    for tool in offered if isinstance(offered, list) else ():
        if isinstance(tool, dict):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else tool.get("name")
            names |= {name} if isinstance(name, str) else set()
    if identity is not None:
        names |= {tool for tool in (identity.hints.last_tool, identity.hints.expected_tool) if tool is not None}
    return TurnFacts(frozenset(names), prompt_tokens(body))
