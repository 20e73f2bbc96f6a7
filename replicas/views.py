"""The frozen views that a scheduler gives its policies."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from cluster.core.lifecycle.machine import Phase, ProgramState, begin
from cluster.core.program import tool_key
from cluster.core.slo import Slo
from cluster.durations.table import DurationTable
from replicas.forecasts import Features, Forecaster
from replicas.hold_table import HeldBlocks, HoldOrigin, HoldTable
from replicas.policy import Forecast, HoldView, KvPlace, LoadView, PauseView, RunningView, TurnView
from replicas.prefill_scheduling import missing_tokens
from replicas.program_table import ProgramTable
from replicas.program_trees import ProgramTrees
from replicas.swapping import Swapping
from replicas.turns import Turn


class Views:
    """Makes the views of turns and programs from the state of the scheduler's parts.

    Args:
        load: the replica's load at the start. The scheduler replaces it in every step.
        turns: the turns by request id.
        programs: the programs.
        trees: their trees.
        holds: the holds.
        swapping: the host tier.
        forecaster: forecasts turns.
        durations: durations of tools.
        block_tokens: tokens of a block.
        bounds_of: returns the bounds of a program's turns, given its key.
    """

    def __init__(
        self,
        *,
        load: LoadView,
        turns: Mapping[str, Turn],
        programs: ProgramTable,
        trees: ProgramTrees,
        holds: HoldTable[KVCacheBlock],
        swapping: Swapping,
        forecaster: Forecaster,
        durations: DurationTable,
        block_tokens: int,
        bounds_of: Callable[[str], Slo],
    ) -> None:
        self.load = load
        """The replica's load in this step."""
        self._turns = turns
        self._programs = programs
        self._trees = trees
        self._holds = holds
        self._swapping = swapping
        self._forecaster = forecaster
        self._durations = durations
        self._block_tokens = block_tokens
        self._bounds_of = bounds_of

    def missing_tokens(self, request: Request) -> int:
        """Return the tokens of a waiting turn that are not held for it."""
        turn = self._turns.get(request.request_id)
        held = self._holds.get(turn.key) if turn is not None and turn.key is not None else None
        return max(1, int(request.num_tokens - request.num_computed_tokens - (held.tokens if held else 0)))

    def is_swapped(self, request: Request) -> bool:
        """Return whether a waiting turn finds its context on the host, of which nothing is on the device yet."""
        turn = self._turns.get(request.request_id)
        if turn is None or turn.key is None or request.num_computed_tokens or turn.key in self._holds:
            return False
        return self._swapping.tokens_of(turn.key) > 0

    def waiting(self, request: Request) -> TurnView:
        """Return the view of a waiting turn."""
        turn = self._turns[request.request_id]
        program = self._programs.get(turn.key) if turn.key is not None else None
        held = self._holds.get(turn.key) if turn.key is not None else None
        place, there = (KvPlace.HELD, held.tokens) if held else (KvPlace.NONE, 0)
        if held is None and turn.key is not None and (there := self._swapping.tokens_of(turn.key)):
            place = KvPlace.SWAPPED
        tokens = request.num_tokens
        return TurnView(  # by position: made for many turns in every step, and by name it takes half as long again
            program or begin(request.request_id, turn.arrived_s),
            turn.identity.hints,
            turn.forecast,
            self.load,
            turn.arrived_s,
            turn.queued_step,
            tokens,
            min(there, tokens),
            request.status is RequestStatus.PREEMPTED,
            place,
            request.num_output_tokens,
            turn.first_token_s,
            turn.bounds,
            self._programs.longest_wait_steps(turn.key) if turn.key is not None else 0,
            self._trees.view(turn.key) if turn.key is not None else None,
            turn.wait_s(self.load.now_s),
        )

    def prefilling(self, request: Request) -> TurnView:
        """Return the view of an admitted turn whose prompt is not completely computed."""
        return replace(self.waiting(request), cached_tokens=request.num_computed_tokens, kv=KvPlace.HELD)

    def running(self, request: Request, blocks: Iterable[KVCacheBlock]) -> RunningView:
        """Return the view of a running turn.

        Args:
            request: the turn.
            blocks: its blocks in memory.
        """
        turn, now_s = self._turns[request.request_id], self.load.now_s
        again_s = turn.admitted_again_s
        return RunningView(
            request_id=request.request_id,
            sheddable=turn.identity.hints.sheddable,
            missing_tokens=max(0, missing_tokens(request) - 1),
            left_tokens=_left_tokens(turn.forecast.output_tokens, request.num_output_tokens, request.max_tokens),
            freed_tokens=sum(block.ref_cnt == 1 for block in blocks) * self._block_tokens,
            computed_tokens=request.num_computed_tokens,
            copied_tokens=self._swapping.tokens_of(turn.key) if turn.key is not None else 0,
            waited_s=now_s - turn.arrived_s if turn.first_token_s is None else turn.wait_s(now_s),
            again_s=None if again_s is None else now_s - again_s,
        )

    def pause(self, program: ProgramState, turn: Turn, context_tokens: int, load: LoadView) -> PauseView:
        """Return the view of a program whose turn has just ended, so that its tools are known.

        Its context counts as running, whose blocks are not held yet; ``load`` does not have it.
        """
        hints = turn.identity.hints
        asked = replace(hints, expected_tool=tool_key(program.tools))
        predicted = turn.identity.forecast
        return PauseView(
            program=program,
            hints=hints,
            forecast=self._forecaster.of(turn.features, asked, self._durations, last=False, foreseen=predicted),
            load=replace(load, running_tokens=load.running_tokens + context_tokens),
            tools=program.tools,
            context_tokens=context_tokens,
            durations=self._durations,
            average_turns=self._programs.average_turns,
            turns_correlation=self._programs.turns_correlation,
            returns=self._returns(program.tools, load.now_s),
        )

    def hold(self, held: HeldBlocks[KVCacheBlock]) -> HoldView:
        """Return the view of a hold."""
        program = self._programs[held.key]
        return HoldView(
            program=program,
            forecast=held.forecast,
            load=self.load,
            durations=self._durations,
            context_tokens=held.tokens,
            since_s=held.since_s,
            until_s=held.until_s,
            owner_waits=program.phase is Phase.RESUMING,
            asked=held.origin is HoldOrigin.ASKED,
            children_s=self._trees.children_s(held.key, self.load),
            bounds=self._bounds_of(held.key) if held.bounds is None else held.bounds,
            host_room=self._swapping.is_on_host(held.key),
            on_disk=self._swapping.is_on_disk(held.key),
            returns=self._returns(program.tools, self.load.now_s),
        )

    def _returns(self, tools: tuple[str, ...], now_s: float) -> float:
        return self._programs.returns.share(tool_key(tools), self._durations, now_s)

    def forecast(self, turn: Turn) -> Forecast:
        """Return the forecast of a turn: by hints, else by the predictor, else by what was learnt here."""
        identity = turn.identity
        last = turn.key is None or identity.last_turn
        return self._forecaster.of(turn.features, identity.hints, self._durations, last, identity.forecast)


def _left_tokens(expected: float, generated: int, most: int) -> float:
    """Return how many tokens a turn will still generate. Beyond its forecast, it goes on for as long again."""
    left = expected - generated if expected > generated else float(generated)
    return max(1.0, min(left, most - generated))


def features_of(turn: Turn, program: ProgramState, prompt_tokens: int, *, compacted: bool = False) -> Features:
    """Return what is known of a turn when it arrives.

    Args:
        turn: the turn.
        program: its program at that time.
        prompt_tokens: length of its prompt, in tokens.
        compacted: whether the prompt is shorter than the context before it. It is then forecast by its length, as a
            first turn is, since the tool before it says nothing of it.
    """
    if compacted:
        return Features.of("", program.turns - 1, prompt_tokens)
    last_tool = turn.identity.hints.last_tool or (tool_key(program.tools) if program.turns > 1 else "")
    return Features.of(last_tool, program.turns - 1, prompt_tokens)
