"""The history of the programs that one process serves. It gives the contexts of turns and the observations of models.

The outcome of a turn is complete when the program's next turn arrives or the program ends. Only then are the called
tool, its duration and its result known. The module is pure: every method is given the time, in seconds.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from cluster.core.program import KEY_MARK, USER_REPLY, without_class
from predictor_service.live_context import ShownRequest
from predictor_service.model import (
    HISTORY,
    NO_TOOL,
    Observation,
    PauseContext,
    PauseOutcome,
    PauseSeen,
    ProgramSeen,
    TurnContext,
    TurnOutcome,
    TurnSeen,
)

MAX_TURNS = 256
"""Turns with a known outcome that are kept of one program. Of those after them, only sums are."""
CHARS_PER_TOKEN = 4.0
"""Characters of a token, until exact token counts are known."""
LEAST_CHARS, MOST_CHARS = 0.5, 16.0
"""Bounds of the mean number of characters of a prompt's tokens."""
RECENT = 32
"""Number of recent prompts that dominate the mean number of characters of a token."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A turn that has arrived."""

    key: str
    """Key of the program, which is unique in the cluster."""
    shown: ShownRequest
    source: str
    """The kind of the program: see `TurnContext.source`."""
    prompt_tokens: int
    """Estimated number of prompt tokens."""
    last: bool = False
    """Whether the client declares this turn to be the program's last one."""
    last_tool: str | None = None
    """The tool whose result the turn brings, as a key of tool statistics; None if the client does not name it."""
    expected_tool: str | None = None
    """The tool that the turn will call; None if the client does not name it."""


@dataclass(slots=True)
class _Ended:
    """A turn that has ended, and whose tool call is not known yet."""

    context: TurnContext
    arrived: Arrived
    output_tokens: int
    at_s: float


@dataclass(slots=True)
class _Program:
    turns: int = 0
    """Number of turns that have arrived and were not refused."""
    open: int = 0
    # Tuples: a deque takes 600 bytes, and each of them would be one more object that garbage collections traverse.
    outputs: tuple[int, ...] = ()
    """Output tokens of each turn. Here and in the next three fields, the most recent turn comes first, and at most
    HISTORY turns are kept."""
    tools: tuple[str, ...] = ()
    durations_s: tuple[float | None, ...] = ()
    returned: tuple[int, ...] = ()
    work: list[tuple[TurnContext, int]] = field(default_factory=list)
    """For each of the first turns, its context without the text, and the number of tokens that were computed for it."""
    later: tuple[int, int] = (0, 0)
    """The tokens that were computed for the turns after those, and the number of these turns."""
    whole: bool = True
    """Whether the turns in `work` and `later` were in order, and none before them was elsewhere."""
    pending: _Ended | None = None
    seen_s: float = 0.0


class LiveHistory:
    """The programs of one process.

    Args:
        max_programs: number of programs that are kept; the least recently used program counts as ended first.
        idle_s: seconds without a turn after which a program counts as ended.
        alone: whether no other process serves turns. Otherwise a program that is idle here may continue there, so that
            only declared ends are learnt.
    """

    def __init__(self, max_programs: int, idle_s: float, *, alone: bool = True) -> None:
        self._max_programs = max_programs
        self._idle_s = idle_s
        self._alone = alone
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._chars_per_token = CHARS_PER_TOKEN
        self._prompts = 0

    def __len__(self) -> int:
        return len(self._programs)

    def arrived(self, turn: Arrived, now_s: float) -> tuple[TurnContext, list[Observation]]:
        """Return the context of a turn that has arrived, and the observations of the turn before it."""
        program = self._programs.setdefault(turn.key, _Program())
        self._programs.move_to_end(turn.key)
        program.seen_s = now_s
        news = self._returned(program, turn, now_s)
        context = self._context(program, turn)
        if not self._alone:
            # Only messages show how many turns were before this one, wherever they were served.
            program.whole &= turn.shown.structured and turn.shown.position == program.turns
        program.turns += 1
        program.open += 1
        while len(self._programs) > self._max_programs:
            news += self._over(next(iter(self._programs)))
        return context, news

    def single(self, turn: Arrived) -> TurnContext:
        """Return the context of a turn that belongs to no program."""
        return self._context(_Program(), turn)

    def ended(
        self,
        turn: Arrived,
        context: TurnContext,
        now_s: float,
        *,
        output_tokens: int | None,
        prompt_tokens: int | None = None,
        refused: bool = False,
    ) -> list[Observation]:
        """Record the end of a turn, and return the observations if its program ends with it.

        Args:
            turn: the argument of `arrived`.
            context: the result of `arrived`.
            now_s: time of the end.
            output_tokens: number of generated tokens; None if the turn failed or the number is unknown.
            prompt_tokens: exact number of prompt tokens; None if it is unknown.
            refused: whether the request was invalid, as one whose prompt is too long, so that the turn never began.
        """
        if prompt_tokens is not None:
            self._count(turn, prompt_tokens)
        program = self._programs.get(turn.key)
        if program is None:
            return []
        program.open = max(0, program.open - 1)
        program.turns -= refused
        program.seen_s = now_s
        if output_tokens is not None:
            tokens, turns = program.later
            computed = context.new_tokens + output_tokens
            program.whole &= context.position == len(program.work) + turns
            if len(program.work) < MAX_TURNS:
                program.work.append((replace(context, text=""), computed))
            else:
                program.later = (tokens + computed, turns + 1)
            program.outputs = (output_tokens, *program.outputs)[:HISTORY]
            program.tools = (NO_TOOL, *program.tools)[:HISTORY]
            program.durations_s = (None, *program.durations_s)[:HISTORY]
            program.returned = (0, *program.returned)[:HISTORY]
            program.pending = _Ended(context, turn, output_tokens, now_s)
        if not turn.last or program.open:
            return []
        return self._over(turn.key, declared=output_tokens is not None)  # another process may repeat a failed turn

    def program_ended(self, key: str) -> list[Observation]:
        """End a program whose last turn was served here, and return its last observations."""
        return self._over(key, declared=True)

    def sweep(self, now_s: float) -> Iterator[list[Observation]]:
        """Forget the programs that have been idle for too long, one at each step, and yield what its end teaches.

        Turns may arrive and end between two steps.
        """
        for key, program in list(self._programs.items()):
            if now_s - program.seen_s < self._idle_s:
                break
            if not program.open and self._programs.get(key) is program:
                yield self._over(key)

    def _context(self, program: _Program, turn: Arrived) -> TurnContext:
        request = turn.shown
        shown = request.turns
        # Recorded turns are exact. The messages give estimates of earlier turns, which another process may have served.
        seen = len(program.outputs)
        estimated = shown[seen:HISTORY]
        new_tokens = self._tokens(request.new_chars)
        if not request.structured and program.pending is not None:
            before = program.pending
            new_tokens = max(0, turn.prompt_tokens - before.context.prompt_tokens - before.output_tokens)
        return TurnContext(
            source=turn.source,
            position=max(program.turns, request.position),
            prompt_tokens=max(turn.prompt_tokens, new_tokens),
            new_tokens=new_tokens or turn.prompt_tokens,
            outputs=(*program.outputs, *(self._tokens(one.output_chars) for one in estimated)),
            tools=(*program.tools, *(one.tool for one in estimated)),
            durations_s=(*program.durations_s, *(None for _ in estimated)),
            returned=(*program.returned, *(self._tokens(one.returned_chars) for one in estimated)),
            text=request.text,
            offered=_offered(turn),
        )

    def _returned(self, program: _Program, turn: Arrived, now_s: float) -> list[Observation]:
        """Return the observations of the turn before, whose tools have returned."""
        before, program.pending = program.pending, None
        if before is None or not _follows(turn.shown, before.arrived.shown):
            return []
        tool, arguments = _called(before, turn)
        if tool is None:
            return []
        outcome = TurnOutcome(before.output_tokens, tool, arguments)
        news: list[Observation] = [TurnSeen(before.context, outcome)]
        duration_s = max(0.0, now_s - before.at_s)
        if turn.shown.structured:
            returned = self._tokens(turn.shown.new_chars)
        else:
            returned = max(0, turn.prompt_tokens - before.context.prompt_tokens - before.output_tokens)
        program.tools = (tool, *program.tools[1:])
        program.durations_s = (duration_s, *program.durations_s[1:])
        program.returned = (returned, *program.returned[1:])
        pause = PauseContext(before.context, tool, before.output_tokens, arguments)
        news.append(PauseSeen(pause, PauseOutcome(duration_s, returned)))
        return news

    def _over(self, key: str, *, declared: bool = False) -> list[Observation]:
        """Forget a program, and return what its end teaches.

        ``declared``: the program is known to have ended with its last turn here.
        """
        program = self._programs.pop(key, None)
        if program is None or not (declared or self._alone):
            return []
        news: list[Observation] = []
        if (last := program.pending) is not None:
            news.append(TurnSeen(last.context, TurnOutcome(last.output_tokens, NO_TOOL, last=True)))
        tokens, turns = program.later
        if program.whole and program.work and program.turns == len(program.work) + turns:
            remaining: list[tuple[int, int]] = []
            for _, computed in reversed(program.work):
                remaining.append((tokens, turns))
                tokens, turns = tokens + computed, turns + 1
            news.append(ProgramSeen(tuple(context for context, _ in program.work), tuple(reversed(remaining))))
        return news

    def _tokens(self, chars: int) -> int:
        return round(chars / self._chars_per_token)

    def _count(self, turn: Arrived, prompt_tokens: int) -> None:
        """Update the mean number of characters of a token from a first turn, whose request shows all of its prompt."""
        if turn.shown.structured and turn.shown.position == 0 and turn.shown.new_chars and prompt_tokens > 0:
            chars = min(max(turn.shown.new_chars / prompt_tokens, LEAST_CHARS), MOST_CHARS)
            self._prompts = min(self._prompts + 1, RECENT)
            self._chars_per_token += (chars - self._chars_per_token) / (1 + self._prompts)


def _offered(turn: Arrived) -> tuple[str, ...]:
    """Return the offered tools. A tool that the client expects is the only one."""
    if turn.expected_tool is None:
        return turn.shown.offered
    return tuple(without_class(turn.expected_tool).split(KEY_MARK))


def _follows(request: ShownRequest, before: ShownRequest) -> bool:
    """Return whether the most recent turn in a request is the answer to the request before. A prompt does not show it.

    It is not if the request before is repeated, if its answer was discarded or replaced by a summary, or if another
    process served turns in between.
    """
    if not request.structured or request.position == before.position + 1:
        return True
    if request.position > before.position or len(request.turns) < 2 or not before.turns:
        return False
    # Where a client drops its oldest turns, the number does not grow.
    return request.turns[1] == before.turns[0] != request.turns[0]


def _called(before: _Ended, turn: Arrived) -> tuple[str | None, str]:
    """Return the tool that the turn before called, or None if it is unknown, and its arguments."""
    shown = turn.shown.turns[0] if turn.shown.turns else None
    arguments = shown.arguments if shown is not None else ""
    said = turn.last_tool or before.arrived.expected_tool
    if said is not None:
        return said, arguments
    # A program that continues without a tool call has waited for its user. The replicas treat it alike.
    return (None, "") if shown is None else (shown.tool or USER_REPLY, arguments)
