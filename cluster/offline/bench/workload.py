"""Workloads: agent programs as lengths and pauses, shaped to fit a server, and the token ids of their prompts."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

MIN_OUTPUT_TOKENS = 1
"""Least output tokens of a turn, as a completion cannot be empty. Recorded turns without output get this many."""


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn. Lengths are in tokens."""

    fresh_tokens: int
    """Prompt tokens after the kept context: the tool's result and new text. Without a context: the whole prompt."""
    output_tokens: int
    kept_tokens: int
    """Last tokens of the output that stay in the next turn's context. Hidden reasoning is not sent again."""
    tool: str | None = None
    """The tool that this turn calls; None if it calls none or is the last turn."""
    pause_s: float = 0.0
    """Seconds from this turn's end to the next turn's intended start. With children, it is what was recorded, and the
    pause lasts until they have ended."""
    reset: bool = False
    """Whether the context does not extend the turn before, so that only the shared prefix is reusable."""
    children: "tuple[PlannedProgram, ...]" = ()
    """The programs that run in the pause after this turn (sub-agents). All begin at its end."""


@dataclass(frozen=True, slots=True)
class LastCall:
    """A tool call after which a recorded program generates nothing more."""

    tool: str
    pause_s: float
    returned_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """One agent program. Its first and each ``reset`` turn begin with ``prefix_tokens`` ids of ``prefix_group``."""

    program_id: str
    kind: str
    turns: tuple[PlannedTurn, ...]
    prefix_group: str | None = None
    prefix_tokens: int = 0
    last_call: LastCall | None = None
    """The call of the last turn, which is recorded, but whose answer no turn has; None: the last turn calls nothing."""

    def contexts(self) -> list[int]:
        """Return the prompt tokens of each turn."""
        contexts: list[int] = []
        kept = 0
        for turn in self.turns:
            contexts.append(turn.fresh_tokens + (0 if turn.reset else kept))
            kept = contexts[-1] + turn.kept_tokens
        return contexts

    def family(self) -> "Iterator[PlannedProgram]":
        """Yield the program and all programs below it."""
        yield self
        for turn in self.turns:
            for child in turn.children:
                yield from child.family()

    @property
    def peak_tokens(self) -> int:
        """Prompt and output tokens of the longest turn of the program and of those below it."""
        return max(
            context + turn.output_tokens
            for program in self.family()
            for context, turn in zip(program.contexts(), program.turns, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Shaping:
    """How recorded programs are scaled and cut to fit a server."""

    scale_lengths: float = 1.0
    scale_tools: float = 1.0
    max_context: int | None = None
    """Largest number of prompt and output tokens of a turn. Programs with a longer turn are dropped."""
    max_turns: int | None = None
    """Number of turns after which a program is cut off."""
    limit: int | None = None
    """Number of programs that are kept, drawn by the seed."""
    categories: tuple[str, ...] = ()
    """Only programs of these kinds. Empty: all kinds."""
    calls: tuple[int, int] | None = None
    """Only programs with at least and at most so many tool calls, which are turns before the last. None: all."""
    no_calls_share: float = 0.0
    """Share of the programs, drawn by the seed, whose calls are disabled (MARS appendix C.2). Such a program is one
    turn with the output of all its turns, and without what the tools returned."""
    repeat_turns: int = 1
    """How many times each program does its turns, one round after the other, with token lengths divided by this number
    (Continuum section 6.3). It keeps the work, and multiplies the turns and the calls."""
    last_calls: bool = False
    """Whether a program waits for the call of its last turn, as in the benchmark of InferCept's authors: it reads what
    the tool returned, and generates one token."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The pool from which arrivals are drawn, with notes about dropped programs."""

    name: str
    programs: tuple[PlannedProgram, ...]
    dropped: int = 0
    """Number of programs that exceed ``Shaping.max_context``."""
    notes: tuple[str, ...] = ()
    """Notes for readers of the results, one sentence each."""

    def only(self, names: Container[str]) -> "Workload":
        """Leave out the programs whose ids are not in ``names``, and note their number."""
        kept = tuple(program for program in self.programs if program.program_id in names)
        left = len(self.programs) - len(kept)
        note = (f"{left} programs without a forecast are left out",) if left else ()
        return replace(self, programs=kept, notes=(*self.notes, *note))

    def shaped(self, shaping: Shaping, seed: int) -> "Workload":
        """Select programs, add the end of last calls, repeat and cut off turns, scale, drop programs that are too long,
        shuffle by ``seed``, keep ``limit``, and disable calls, in this order.
        """
        selected = [program for program in self.programs if _selected(program, shaping)]
        if shaping.last_calls:
            selected = [_waiting(program) for program in selected]
        repeated = [_repeated(program, shaping.repeat_turns) for program in selected]
        scaled = [_scaled(_cut(program, shaping.max_turns), shaping) for program in repeated]
        fitting = [p for p in scaled if shaping.max_context is None or p.peak_tokens <= shaping.max_context]
        rng = np.random.default_rng(seed)
        kept = [fitting[i] for i in rng.permutation(len(fitting))[: shaping.limit]]
        silent = set(rng.permutation(len(kept))[: round(shaping.no_calls_share * len(kept))].tolist())
        programs = [_without_calls(p) if number in silent else p for number, p in enumerate(kept)]
        return replace(self, programs=tuple(programs), dropped=self.dropped + len(scaled) - len(fitting))


def draw(programs: Sequence[PlannedProgram], count: int, rng: np.random.Generator) -> list[PlannedProgram]:
    """Draw ``count`` programs: all of them in random order, then again in another order, as often as needed.

    Raises:
        ValueError: ``programs`` is empty.
    """
    if not programs:
        raise ValueError("no programs to draw from")
    drawn: list[PlannedProgram] = []
    while len(drawn) < count:
        drawn.extend(programs[i] for i in rng.permutation(len(programs))[: count - len(drawn)])
    return drawn


def prefix_notes(programs: Iterable[PlannedProgram]) -> tuple[str, ...]:
    """Return a note if some programs name a shared prefix whose length was not recorded."""
    unknown = sum(program.prefix_group is not None and program.prefix_tokens == 0 for program in programs)
    if not unknown:
        return ()
    return (f"{unknown} programs name a shared prefix without its length: they are replayed with nothing shared",)


def _selected(program: PlannedProgram, shaping: Shaping) -> bool:
    calls = len(program.turns) - 1
    if shaping.categories and program.kind not in shaping.categories:
        return False
    return shaping.calls is None or shaping.calls[0] <= calls <= shaping.calls[1]


def _repeated(program: PlannedProgram, times: int) -> PlannedProgram:
    """Return the program with its turns ``times`` times. Lengths are divided by ``times``, so that the work stays."""
    if times == 1:
        return program
    shorter = _scaled(program, Shaping(scale_lengths=1 / times))
    return replace(shorter, turns=shorter.turns * times)


def _waiting(program: PlannedProgram) -> PlannedProgram:
    """Return the program with a turn after its last call, if it has one."""
    if (call := program.last_call) is None:
        return program
    *before, last = program.turns
    end = PlannedTurn(call.returned_tokens, MIN_OUTPUT_TOKENS, MIN_OUTPUT_TOKENS)
    return replace(program, turns=(*before, replace(last, tool=call.tool, pause_s=call.pause_s), end), last_call=None)


def _without_calls(program: PlannedProgram) -> PlannedProgram:
    output = sum(turn.output_tokens for turn in program.turns)
    return replace(program, turns=(PlannedTurn(program.turns[0].fresh_tokens, output, output),))


def _cut(program: PlannedProgram, max_turns: int | None) -> PlannedProgram:
    if max_turns is None or len(program.turns) <= max_turns:
        return program
    kept = program.turns[:max_turns]
    return replace(program, turns=(*kept[:-1], replace(kept[-1], tool=None, pause_s=0.0, children=())))


def _scaled(program: PlannedProgram, shaping: Shaping) -> PlannedProgram:
    by = shaping.scale_lengths
    turns = []
    for index, turn in enumerate(program.turns):
        output = max(MIN_OUTPUT_TOKENS, round(turn.output_tokens * by))
        starts = index == 0 or turn.reset
        turns.append(
            replace(
                turn,
                fresh_tokens=max(1 if starts else 0, round(turn.fresh_tokens * by)),
                output_tokens=output,
                kept_tokens=min(output, round(turn.kept_tokens * by))
                if turn.kept_tokens < turn.output_tokens
                else output,
                pause_s=turn.pause_s * shaping.scale_tools,
                children=tuple(_scaled(child, shaping) for child in turn.children),
            )
        )
    return replace(program, turns=tuple(turns), prefix_tokens=round(program.prefix_tokens * by))


@dataclass(frozen=True, slots=True)
class TurnWork:
    """The work of one turn. Lengths are in tokens."""

    prompt_tokens: int
    """Tokens of the whole prompt."""
    new_tokens: int
    """Prompt tokens that no earlier turn has sent or generated at the same position."""
    output_tokens: int
    returned_tokens: int
    """Prompt tokens of the next turn beyond this turn's prompt and output; 0 for a last turn."""


def turns_of(program: PlannedProgram) -> list[TurnWork]:
    """Return the work of a program's turns. The shared prefix counts as new only in the first turn, as resets keep it.

    If only a part of a turn's output is sent again (hidden reasoning), this part moves to another position in the
    context and counts as new in the next turn.
    """
    contexts = program.contexts()
    works: list[TurnWork] = []
    for index, turn in enumerate(program.turns):
        new = turn.fresh_tokens
        if index and turn.reset:
            new -= min(program.prefix_tokens, new)
        elif index and (before := program.turns[index - 1]).kept_tokens < before.output_tokens:
            new += before.kept_tokens
        following = contexts[index + 1] if index + 1 < len(contexts) else 0
        works.append(
            TurnWork(
                prompt_tokens=contexts[index],
                new_tokens=new,
                output_tokens=turn.output_tokens,
                returned_tokens=max(0, following - contexts[index] - turn.output_tokens),
            )
        )
    return works


def tokens_of(works: Sequence[TurnWork]) -> int:
    """Return the tokens to compute: new prompt tokens and outputs."""
    return sum(work.new_tokens + work.output_tokens for work in works)


TOKEN_IDS = range(32, 256)
"""Token ids that every byte-level or sentence-piece vocabulary has, after the special tokens at its beginning."""


class Conversation:
    """Builds each turn's prompt, which extends the token ids of the turn before exactly.

    With the same ``seed``, programs of the same ``prefix_group`` begin with the same ids.
    """

    def __init__(self, program: PlannedProgram, seed: tuple[int, ...]) -> None:
        self._rng = np.random.default_rng(seed)
        self._prefix: list[int] = []
        if program.prefix_group is not None:
            group = np.random.default_rng([seed[0], crc32(program.prefix_group.encode())])
            self._prefix = _random_ids(group, program.prefix_tokens)
        self._ids: list[int] = []
        self._known = 0

    def prompt(self, turn: PlannedTurn) -> tuple[list[int], int]:
        """Return the ids to send, and how many of the first ones the turn before had sent or generated."""
        if not self._ids or turn.reset:
            self._known = len(self._prefix[: turn.fresh_tokens]) if self._ids else 0
            self._ids = self._prefix[: turn.fresh_tokens]
            self._ids = self._ids + _random_ids(self._rng, turn.fresh_tokens - len(self._ids))
        else:
            self._ids = self._ids + _random_ids(self._rng, turn.fresh_tokens)
        return self._ids, self._known

    def answered(self, generated: list[int], kept_tokens: int) -> None:
        """Add the last ``kept_tokens`` of the generated ids to the context. Hidden reasoning comes before them."""
        sent = len(self._ids)
        self._ids = self._ids + generated[len(generated) - kept_tokens :]
        self._known = len(self._ids) if kept_tokens == len(generated) else sent


def _random_ids(rng: np.random.Generator, count: int) -> list[int]:
    ids: list[int] = rng.integers(TOKEN_IDS.start, TOKEN_IDS.stop, size=count).tolist()
    return ids
