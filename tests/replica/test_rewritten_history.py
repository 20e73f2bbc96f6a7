"""Timelines of programs whose next prompt does not extend their context, of programs with two turns at once, and the
list of a replica's programs.
"""

from collections.abc import Callable, Sequence

import pytest

from cluster.core.lifecycle.events import ReleaseReason
from cluster.core.lifecycle.machine import Phase
from cluster.core.program import USER_REPLY, Hints, ProgramIdentity
from replicas.control import dispatch
from replicas.virtual_engine import VirtualEngine
from tests.replica.test_timelines import BLOCK, Programs

Replica = Callable[..., VirtualEngine]
KEY = "default/a"


@pytest.fixture
def program(replica: Replica) -> Programs:
    return Programs(replica("continuum", default_ttl_s=10.0))


def arrive(p: Programs, prompt: Sequence[int], output: int = 1, tool: str = "ls") -> list[int]:
    """A turn of program a arrives with exactly this prompt. Its tokens grow with its output."""
    identity = ProgramIdentity(program_id="a", hints=Hints(expected_tool=tool))
    p.turns["a"] = p.turns.get("a", 0) + 1
    return p.engine.submit(f"a{p.turns['a']}", list(prompt), output, identity)._all_token_ids


def turn(p: Programs, prompt: Sequence[int], output: int = 1, tool: str = "ls") -> list[int]:
    context = arrive(p, prompt, output, tool)
    p.engine.run()
    return context


def held_blocks(p: Programs) -> int:
    held = p.scheduler.holds.get(KEY)
    return 0 if held is None else len(held.blocks)


def cached(p: Programs) -> int:
    story = p.scheduler.programs.to_public_dict(KEY)
    assert story is not None
    return int(story["turns"][-1]["cached_tokens"])


def test_what_a_compacted_prompt_replaces_is_free_before_the_turn_is_admitted(program: Programs) -> None:
    free = program.engine.free_blocks()
    turn(program, range(20 * BLOCK), output=2)
    assert (held_blocks(program), program.engine.free_blocks()) == (21, free - 21)
    arrive(program, [*range(4 * BLOCK), *range(5000, 5000 + 2 * BLOCK)])
    assert (held_blocks(program), program.engine.free_blocks()) == (4, free - 4)
    assert program.scheduler.holds.num_tokens == 4 * BLOCK
    assert program.phase("a") is Phase.RESUMING
    assert program.scheduler.counters["superseded_blocks"] == 17
    program.engine.run()
    assert cached(program) == 4 * BLOCK
    assert held_blocks(program) == 6  # the new context, whose last token has no KV


def test_a_prompt_that_shares_nothing_ends_the_hold_at_once(program: Programs) -> None:
    free = program.engine.free_blocks()
    turn(program, range(20 * BLOCK))
    arrive(program, range(5000, 5000 + 2 * BLOCK))
    assert program.engine.free_blocks() == free
    assert program.phase("a") is Phase.RUNNING
    assert program.scheduler.stats.holds_ended[ReleaseReason.SUPERSEDED] == 1
    program.engine.run()
    assert cached(program) == 0


def test_a_prompt_that_extends_the_context_loses_nothing(program: Programs) -> None:
    context = turn(program, range(100), output=20)
    before = held_blocks(program)
    arrive(program, [*context, *range(5000, 5040)])
    assert held_blocks(program) == before
    assert program.scheduler.counters["superseded_blocks"] == 0


def test_a_compacted_prompt_is_forecast_by_its_length_and_teaches_nothing_of_its_tool(program: Programs) -> None:
    context = turn(program, range(20 * BLOCK), output=20)
    request = [*range(4 * BLOCK), *range(5000, 5000 + 2 * BLOCK)]
    learnt = program.scheduler.forecaster._returned._sums.copy()
    arrive(program, request)
    features = program.scheduler.turns["a2"].features
    assert (features.kind, features.position) == (f"prompt:{len(request).bit_length()}", 1)
    assert program.scheduler.forecaster._returned._sums == learnt
    program.engine.run()
    arrive(program, [*request, *range(6000, 6000 + len(context))])
    assert program.scheduler.turns["a3"].features.kind == "ls"
    assert program.scheduler.forecaster._returned._sums != learnt


def test_an_output_that_a_template_drops_is_not_held_again(program: Programs) -> None:
    prompt = list(range(4 * BLOCK))
    turn(program, prompt, output=5 * BLOCK)
    assert held_blocks(program) == 9
    prompt += range(5000, 5000 + 2 * BLOCK)  # the next prompt has none of the output
    arrive(program, prompt, output=5 * BLOCK)
    assert held_blocks(program) == 4
    program.engine.run()
    assert held_blocks(program) == 6  # the prompt, without the output
    assert program.scheduler.holds.num_tokens == 6 * BLOCK
    prompt += range(6000, 6000 + BLOCK)
    turn(program, prompt)
    assert cached(program) == 6 * BLOCK
    assert program.scheduler.counters["superseded_blocks"] == 5  # of the first turn only


def test_an_output_that_returns_after_all_is_held_again(program: Programs) -> None:
    prompt = list(range(4 * BLOCK))
    turn(program, prompt, output=2 * BLOCK)
    second = turn(program, [*prompt, *range(5000, 5000 + BLOCK)], output=2 * BLOCK)
    assert held_blocks(program) == 5
    third = turn(program, [*second, *range(6000, 6000 + BLOCK)], output=2 * BLOCK)
    assert held_blocks(program) == len(third) // BLOCK


def test_outputs_that_are_dropped_when_a_user_answers_are_held_for_tools(program: Programs) -> None:
    prompt = list(range(4 * BLOCK))
    turn(program, prompt, output=2 * BLOCK, tool=USER_REPLY)
    prompt += range(5000, 5000 + BLOCK)
    context = turn(program, prompt, output=2 * BLOCK, tool="ls")
    assert held_blocks(program) == len(context) // BLOCK
    turn(program, [*context, *range(6000, 6000 + BLOCK)], output=2 * BLOCK, tool=USER_REPLY)
    assert held_blocks(program) == len(context) // BLOCK + 1


def test_a_program_with_two_turns_at_once_pauses_when_the_last_one_ends(program: Programs) -> None:
    context = turn(program, range(100))
    arrive(program, [*context, *range(5000, 5010)], output=3)
    arrive(program, [*context, *range(6000, 6010)], output=8)
    state = program.scheduler.programs[KEY]
    assert (state.active, state.turns, state.phase) == (2, 3, Phase.RESUMING)
    while program.scheduler.programs[KEY].active == 2:
        program.step()
    assert (program.phase("a"), program.held()) == (Phase.RUNNING, set())
    program.engine.run()
    assert (program.phase("a"), program.held()) == (Phase.HELD, {"a"})
    held = program.scheduler.holds.get(KEY)
    assert held is not None
    assert held.tokens == len(context) + 10 + 8 - 1  # the context of the turn that ended last


def test_a_second_turn_does_not_release_what_the_first_one_will_use(program: Programs) -> None:
    context = turn(program, range(20 * BLOCK))
    arrive(program, [*context, *range(5000, 5010)])
    before = held_blocks(program)
    arrive(program, range(6000, 6000 + BLOCK))
    assert held_blocks(program) == before


def test_the_programs_of_a_tenant_are_listed_the_last_served_first(replica: Replica) -> None:
    p = Programs(replica("continuum", default_ttl_s=5.0))
    for name in "abc":
        p.turn(name, new_tokens=100)
        p.clock.advance(1.0)
    p.turn("b", new_tokens=10)
    p.clock.advance(10.0)
    p.step()  # the holds expire, which is no turn
    p.engine.submit("other", range(10), 1, ProgramIdentity("x", tenant="other"))
    p.arrive("a", new_tokens=10)
    listed = dispatch(p.scheduler, "sessions", {"tenant": "default", "limit": 2})["sessions"]
    assert [(one["program"], one["turns"], one["idle_s"]) for one in listed] == [("a", 2, 0.0), ("b", 2, 10.0)]
    assert (listed[1]["phase"], listed[1]["age_s"]) == ("released", 12.0)
    assert (listed[1]["prompt_tokens"], listed[1]["cached_tokens"]) == (211, 6 * BLOCK)
    [other] = dispatch(p.scheduler, "sessions", {"tenant": "other", "limit": 9})["sessions"]
    assert other["program"] == "x"
    p.engine.run()
