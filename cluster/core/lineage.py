"""Finds the program of a request that names none, by its messages or its prompt; and requests that are no turn of the
program they name.

A request continues a program if its messages are those of the program's last request, followed by an answer. The
index knows programs by digests of their requests (`cluster.core.message_chain`). The items of a response's input are
messages too. A completion continues a program if its prompt begins with that of the program's last request and its
answer (`cluster.core.prompt_lineage`). Each ingress has its own index, see
`docs/adr/0009-a-program-without-an-id-is-known-by-its-messages.md`. A lost entry costs a new program, never an error.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from uuid import uuid4

from cluster.core.message_chain import MessageChain, Opening, chain_of, opening_of
from cluster.core.program import ProgramIdentity
from cluster.core.prompt_lineage import ID_PREFIX, PromptIndex, PromptProgram, prompt_of

MAX_PROGRAMS = 20_000
"""Largest number of programs of an index, of each kind. Those known by messages take at most about 60 MB with all their
points, and those known by prompts 30 MB."""
MAX_POINTS = 8
"""Largest number of requests by which a program is known: its first and its latest ones."""
MAX_HOLDERS = 256
"""Largest number of programs that are known by one point. If more have equal prompts, the oldest ones are dropped."""


class Attribution(StrEnum):
    """The way in which a request's program was found."""

    NAMED = "named"
    """The request names it."""
    SIDE_CALL = "side_call"
    """The request names a program but is no turn of it, so that it is a program of one turn."""
    BEGUN = "begun"
    """No known program has these messages or this prompt, so that a new one begins."""
    CONTINUED = "continued"
    """It extends a program's last request."""
    REWRITTEN = "rewritten"
    """It keeps only the beginning of a program's last request, and the program has no other turn in flight."""
    FORKED = "forked"
    """The same, while the program has a turn in flight: a new program, with that one as its parent."""
    UNKNOWN = "unknown"
    """It names no program, and has neither messages nor a single prompt. It belongs to no program."""


@dataclass(slots=True, eq=False)
class _Program:
    id: str
    points: deque[bytes] = field(default_factory=deque)
    """Digests of its requests: the first, and the latest ones. The last is its tail."""
    turns: int = 0
    active: int = 0
    """Number of its turns in flight."""

    @property
    def tail(self) -> bytes:
        return self.points[-1]


@dataclass(slots=True)
class Attributed:
    """A request with its program. `LineageIndex.ended` must be called once the turn has ended."""

    identity: ProgramIdentity
    how: Attribution
    _program: _Program | PromptProgram | None = None
    _ended: bool = False

    @property
    def by_prompt(self) -> PromptProgram | None:
        """The program, if it is known by its prompts. It has to receive the beginning of the turn's answer."""
        return self._program if isinstance(self._program, PromptProgram) else None


class LineageIndex:
    """The programs that one ingress knows by their messages. The least recently used ones are forgotten.

    Args:
        max_programs: largest number of programs without an id, and of programs with one.
    """

    def __init__(self, max_programs: int = MAX_PROGRAMS) -> None:
        self._max_programs = max_programs
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._points: dict[bytes, list[_Program]] = {}
        self._prompts = PromptIndex(max_programs, MAX_HOLDERS)
        self._main_lines: OrderedDict[str, Opening] = OrderedDict()
        self.counters: Counter[Attribution] = Counter()

    def __len__(self) -> int:
        return len(self._programs) + len(self._prompts)

    def attribute(self, identity: ProgramIdentity, body: Mapping[str, Any], new_id: str | None = None) -> Attributed:
        """Return the program of a request. Its turn is in flight from now on.

        Args:
            identity: what the request says of itself.
            body: the request's body. An invalid one gives `Attribution.UNKNOWN` or `Attribution.NAMED`.
            new_id: the id of the program if a new one begins. None: an id that other ingresses give to it too, or a
                random one.
        """
        if identity.program_id is not None:
            found = self._named(identity, body)
        elif (chain := chain_of(identity.tenant, body)) is not None:
            found = self._by_messages(identity, chain, new_id)
        elif (prompt := prompt_of(identity.tenant, body)) is not None:
            program, known = self._prompts.turn(prompt)
            how = Attribution.CONTINUED if known else Attribution.BEGUN
            found = Attributed(replace(identity, program_id=program.id, first_turn=not known), how, program)
        else:
            found = Attributed(identity, Attribution.UNKNOWN)
        self.counters[found.how] += 1
        return found

    def ended(self, turn: Attributed, *, served: bool = True) -> None:
        """Record the end of a turn. A second call does nothing.

        ``served`` False: it failed before its first token. If it was a program's first turn, the program is forgotten,
        so that a repeated request begins it again.
        """
        program = turn._program
        if program is None or turn._ended:
            return
        turn._ended = True
        if isinstance(program, PromptProgram):
            self._prompts.ended(program, served=served)
            return
        program.active -= 1
        if not served and program.turns == 1 and self._programs.get(program.id) is program:
            self._forget(program)

    def check_integrity(self) -> None:
        """Check that points and programs agree.

        Raises:
            AssertionError: they do not.
        """
        held = {(digest, holder.id) for digest, holders in self._points.items() for holder in holders}
        known = {(digest, program.id) for program in self._programs.values() for digest in program.points}
        assert held <= known, f"points without a program: {held - known}"
        assert all(self._points.values()), "a point without holders"
        assert len(self._programs) <= self._max_programs and len(self._main_lines) <= self._max_programs
        self._prompts.check_integrity()

    # --- requests that name a program ---------------------------------------------------------------------------------

    def _named(self, identity: ProgramIdentity, body: Mapping[str, Any]) -> Attributed:
        key, opening = str(identity.key), opening_of(body)
        if opening is None:
            return Attributed(identity, Attribution.NAMED)
        identity = replace(identity, first_turn=not opening.is_answered)
        main = self._main_lines.get(key)
        if main is not None and _is_side_call(opening, main):
            self._main_lines.move_to_end(key)
            side = replace(
                identity, program_id=_new_id(), parent_id=identity.program_id, first_turn=True, last_turn=True
            )
            return Attributed(side, Attribution.SIDE_CALL)
        self._main_lines[key] = opening
        self._main_lines.move_to_end(key)
        if len(self._main_lines) > self._max_programs:
            self._main_lines.popitem(last=False)
        return Attributed(identity, Attribution.NAMED)

    # --- requests that name none --------------------------------------------------------------------------------------

    def _by_messages(self, identity: ProgramIdentity, chain: MessageChain, new_id: str | None) -> Attributed:
        if (program := self._continued(chain)) is not None:
            return self._turn(identity, program, chain, Attribution.CONTINUED)
        identity = replace(identity, first_turn=not any(chain.is_answer))
        if (program := self._passed(chain)) is None:
            begun = self._begin(new_id or _root_id(chain))
            return self._turn(identity, begun, chain, Attribution.BEGUN)
        if program.active == 0:
            return self._turn(identity, program, chain, Attribution.REWRITTEN)
        forked = replace(identity, parent_id=program.id, first_turn=True)
        return self._turn(forked, self._begin(new_id or _new_id()), chain, Attribution.FORKED)

    def _continued(self, chain: MessageChain) -> _Program | None:
        """Return the program whose last request these messages extend by an answer, or repeat. The longest wins.

        Of several with the same messages, the oldest whose answer has come is chosen. A first request that is repeated
        begins another program: samples of one prompt look like this.
        """
        for place, holders in self._known(chain):
            tails = [program for program in holders if program.tail == chain.digests[place]]
            idle = next((program for program in tails if program.active == 0), None)
            if place + 1 < len(chain.digests):
                if tails and chain.is_answer[place + 1]:
                    return idle or tails[0]
            elif idle is not None and any(chain.is_answer):
                return idle
        return None

    def _passed(self, chain: MessageChain) -> _Program | None:
        """Return the program that shares the longest earlier request with these messages.

        Without an answer after that request, the program must have had one, as only then its history was rewritten.
        """
        if not any(chain.is_answer) and len(chain.digests) == chain.begins and chain.digests[-1] in self._points:
            return None
        for place, holders in self._known(chain):
            answered = place + 1 == len(chain.digests) or chain.is_answer[place + 1]
            found = [program for program in holders if answered or program.turns > 1]
            if found:
                return next((program for program in reversed(found) if program.active == 0), found[-1])
        return None

    def _known(self, chain: MessageChain) -> Iterator[tuple[int, list[_Program]]]:
        for place in range(len(chain.digests) - 1, -1, -1):
            if (holders := self._points.get(chain.digests[place])) is not None:
                yield place, holders

    def _begin(self, program_id: str) -> _Program:
        if program_id in self._programs:
            program_id = _new_id()
        program = self._programs[program_id] = _Program(program_id)
        if len(self._programs) > self._max_programs:
            self._forget(next(iter(self._programs.values())))
        return program

    def _turn(self, identity: ProgramIdentity, program: _Program, chain: MessageChain, how: Attribution) -> Attributed:
        self._programs.move_to_end(program.id)
        program.turns += 1
        program.active += 1
        self._extend(program, chain.digests[-1])
        return Attributed(replace(identity, program_id=program.id), how, program)

    def _extend(self, program: _Program, digest: bytes) -> None:
        if digest in program.points:  # a repeated request, or a history that was rewritten to an earlier state
            program.points.remove(digest)
        else:
            holders = self._points.setdefault(digest, [])
            holders.append(program)
            if len(holders) > MAX_HOLDERS:
                del holders[0]
        program.points.append(digest)
        if len(program.points) > MAX_POINTS:
            dropped = program.points[1]
            del program.points[1]
            self._drop(program, dropped)

    def _forget(self, program: _Program) -> None:
        del self._programs[program.id]
        for digest in program.points:
            self._drop(program, digest)

    def _drop(self, program: _Program, digest: bytes) -> None:
        holders = self._points.get(digest, [])
        if program in holders:
            holders.remove(program)
            if not holders:
                del self._points[digest]


def _is_side_call(opening: Opening, main: Opening) -> bool:
    """Return whether a request has nothing in common with the program's main line, and offers no tools though that
    does.
    """
    return main.has_tools and not opening.has_tools and opening.system != main.system and opening.first != main.first


def _root_id(chain: MessageChain) -> str:
    """Return the id that every ingress gives to the first program with this beginning."""
    return ID_PREFIX + chain.digests[chain.begins - 1].hex()


def _new_id() -> str:
    return ID_PREFIX + uuid4().hex
