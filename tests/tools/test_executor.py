"""The executor as timelines: what is asked when, and what becomes of it. The clock moves only when a test says so."""

import asyncio
import random
from collections.abc import Callable

import pytest

from cluster.core.errors import ToolFailed, ToolRefused, ToolUnknown
from cluster.core.tools import IN_NEXT_MESSAGE, Outcome, ToolCall, ToolResult
from tests.tools.scripted import ManualTimers, ScriptedKind, settings, settle
from tools_runtime import executor as executor_module
from tools_runtime.executor import ToolExecutor
from tools_runtime.kind import Invocation, ToolOutput, sleep_until
from tools_runtime.partial_output import MAX_CHARS

Make = Callable[..., ToolExecutor]


def taking(clock: ManualTimers, seconds: float, text: str = "done") -> Callable[[Invocation], object]:
    async def step(_: Invocation) -> str:
        await sleep_until(clock, clock.now_s() + seconds)
        return text

    return step


def failing(error: Exception) -> Callable[[Invocation], object]:
    def step(_: Invocation) -> str:
        raise error

    return step


async def never(_: Invocation) -> str:
    await asyncio.Event().wait()
    return "never"


async def stubborn(_: Invocation) -> str:
    """Does not stop when it is told to."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling() > 1:
                raise


def ask(executor: ToolExecutor, name: str, id: str = "c1", **said: object) -> "asyncio.Task[ToolResult]":
    return asyncio.create_task(executor.run(ToolCall(id, name, **said)))  # type: ignore[arg-type]


async def test_a_call_is_answered_with_its_times(executor: Make, clock: ManualTimers) -> None:
    ex = executor((ScriptedKind("t", taking(clock, 2.0, "hello")), settings()))
    task = ask(ex, "t")
    await clock.pass_s(2.0)
    assert task.result() == ToolResult("c1", "t", Outcome.OK, "hello", False, 0.0, 2.0, 1, "t")


async def test_calls_of_a_turn_run_together_and_answer_in_order(executor: Make, clock: ManualTimers) -> None:
    tools = [(ScriptedKind(f"t{n}", taking(clock, n, f"after {n}")), settings()) for n in (3, 1, 2)]
    ex = executor(*tools)
    task = asyncio.gather(*(ask(ex, f"t{n}", f"c{n}") for n in (3, 1, 2)))
    await clock.pass_s(2.9)
    assert not task.done()
    await clock.pass_s(0.1)
    assert [result.text for result in task.result()] == ["after 3", "after 1", "after 2"]


async def test_places_are_taken_in_order_of_arrival(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("t", taking(clock, 1.0))
    ex = executor((kind, settings(concurrency=2)))
    tasks = [ask(ex, "t", f"c{n}", arguments={"n": n}) for n in range(5)]
    await settle()
    assert kind.running == 2
    await clock.pass_s(3.0)
    assert [task.result().queue_s for task in tasks] == [0.0, 0.0, 1.0, 1.0, 2.0]
    assert [start.arguments["n"] for start in kind.started] == [0, 1, 2, 3, 4]


async def test_more_than_may_wait_are_refused_at_once(executor: Make, clock: ManualTimers) -> None:
    ex = executor((ScriptedKind("t", never), settings(concurrency=1, max_queued=1)))
    tasks = [ask(ex, "t", f"c{n}") for n in range(3)]
    await settle()
    assert [task.done() for task in tasks] == [False, False, True]
    assert tasks[2].result().outcome is Outcome.REFUSED
    assert "busy" in tasks[2].result().text


async def test_a_deadline_covers_the_wait_and_the_run(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("t", never)
    ex = executor((kind, settings(concurrency=1, deadline_s=5.0)))
    runs, waits = ask(ex, "t", "runs"), ask(ex, "t", "waits", deadline_s=3.0)
    await clock.pass_s(3.0)
    late = waits.result()
    assert (late.outcome, late.queue_s, late.attempts) == (Outcome.TIMEOUT, 3.0, 0)
    assert late.text == "timeout: t did not answer within 3 s; it was never started"
    await clock.pass_s(2.0)
    assert runs.result().outcome is Outcome.TIMEOUT
    assert "may have taken effect" in runs.result().text
    assert kind.cancelled == 1


async def test_a_tool_that_does_not_stop_delays_only_its_own_callers(executor: Make, clock: ManualTimers) -> None:
    bad, good = ScriptedKind("bad", stubborn), ScriptedKind("good", taking(clock, 1.0))
    ex = executor((bad, settings(concurrency=1, deadline_s=2.0)), (good, settings(deadline_s=2.0)))
    first = ask(ex, "bad", "b1")
    await clock.pass_s(2.0)
    assert first.result().outcome is Outcome.TIMEOUT, "answered although the tool goes on"
    assert bad.running == 1
    second, other = ask(ex, "bad", "b2"), ask(ex, "good", "g1")
    await clock.pass_s(2.0)
    assert other.result().outcome is Outcome.OK
    assert second.result().text.endswith("it was never started"), "the place of the first is still taken"
    for task in list(ex._tasks):  # a second cancellation ends what ignored the first
        task.cancel()


async def test_only_idempotent_tools_are_tried_again(executor: Make, clock: ManualTimers) -> None:
    flaky = ScriptedKind(
        "flaky", failing(ToolFailed("busy", transient=True)), failing(ToolUnknown("gone")), taking(clock, 0.0)
    )
    once = ScriptedKind("once", failing(ToolFailed("busy", transient=True)))
    ex = executor((flaky, settings(idempotent=True, retries=2)), (once, settings(retries=2)), jitter=random.Random(1))
    again, not_again = ask(ex, "flaky"), ask(ex, "once", "c2")
    await clock.pass_s(5.0)
    assert (again.result().outcome, again.result().attempts) == (Outcome.OK, 3)
    assert (not_again.result().outcome, not_again.result().attempts) == (Outcome.ERROR, 1)


async def test_retries_end_with_their_number_or_with_the_deadline(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("t", failing(ToolFailed("busy", transient=True)))
    ex = executor((kind, settings(idempotent=True, retries=3, retry_backoff_s=1.0, deadline_s=2.0)))
    task = ask(ex, "t")
    await clock.pass_s(2.0)
    assert task.result().text == "error: busy", "a retry after the deadline is not waited for"
    assert 1 < len(kind.started) < 4
    plenty = ask(ex, "t", "c2", deadline_s=2.0)
    await clock.pass_s(2.0)
    assert plenty.result().outcome is Outcome.ERROR


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ToolRefused("not allowed"), Outcome.REFUSED),
        (ToolFailed("no such file"), Outcome.ERROR),
        (ToolUnknown("it died"), Outcome.UNKNOWN),
        (KeyError("a defect"), Outcome.ERROR),
        (asyncio.CancelledError(), Outcome.UNKNOWN),
        (RecursionError("deep"), Outcome.ERROR),
    ],
)
async def test_whatever_a_tool_raises_becomes_one_readable_outcome(
    executor: Make, error: Exception, outcome: Outcome
) -> None:
    ex = executor((ScriptedKind("t", failing(error)), settings()))
    result = await ex.run(ToolCall("c1", "t"))
    assert result.outcome is outcome
    assert result.text.startswith(f"{outcome}: ")
    assert len(result.text) > len(f"{outcome}: ")


async def test_cancelling_a_call_reaches_the_tool(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("t", never)
    ex = executor((kind, settings()))
    by_id, by_task, by_program = (
        ask(ex, "t", "a", program="p"),
        ask(ex, "t", "b", program="p"),
        ask(ex, "t", "c", program="q"),
    )
    await clock.pass_s(1.0)
    assert ex.cancel("p", "a")
    assert not ex.cancel("p", "a"), "it is not under way any more"
    by_task.cancel()
    assert ex.cancel("q", "c")
    await settle()
    assert by_id.result().outcome is Outcome.CANCELLED
    assert (by_id.result().run_s, by_id.result().attempts) == (1.0, 1)
    assert by_task.cancelled()
    assert by_program.result().outcome is Outcome.CANCELLED
    assert (kind.cancelled, kind.running) == (3, 0)


async def test_the_same_id_twice_at_a_time_is_refused_but_not_of_two_programs(executor: Make) -> None:
    ex = executor((ScriptedKind("t", never), settings()))
    first, same, other = ask(ex, "t", "a"), ask(ex, "t", "a"), ask(ex, "t", "a", program="q")
    await settle()
    assert (first.done(), other.done()) == (False, False)
    assert same.result().outcome is Outcome.REFUSED


async def test_an_idempotency_key_joins_and_is_remembered(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("pay", taking(clock, 2.0, "paid"))
    ex = executor((kind, settings()))
    first, joins = ask(ex, "pay", "a", idempotency_key="k"), ask(ex, "pay", "b", idempotency_key="k")
    await clock.pass_s(2.0)
    later = await ex.run(ToolCall("c", "pay", idempotency_key="k"))
    assert [first.result().text, joins.result().text, later.text] == ["paid"] * 3
    assert [first.result().call_id, joins.result().call_id, later.call_id] == ["a", "b", "c"]
    assert len(kind.started) == 1
    of_another_program = ask(ex, "pay", "d", program="q", idempotency_key="k")
    await clock.pass_s(2.0)
    assert of_another_program.result().text == "paid"
    assert len(kind.started) == 2, "keys of different programs are different keys"


async def test_one_consent_runs_its_tool_once_in_whatever_program(executor: Make, clock: ManualTimers) -> None:
    tool = ScriptedKind("pay", taking(clock, 1.0))
    ex = executor((tool, settings()))
    tasks = [ask(ex, "pay", f"r{i}/0.0", program=f"p{i}", consent="t/mcpr_1", idempotency_key=f"{i}") for i in range(2)]
    await clock.pass_s(1.0)
    later = await ex.run(ToolCall("r2/0.0", "pay", program="p2", consent="t/mcpr_1", idempotency_key="2"))
    assert [task.result().text for task in tasks] + [later.text] == ["done"] * 3
    assert len(tool.started) == 1


async def test_a_key_stands_for_one_call(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("pay", taking(clock, 1.0))
    ex = executor((kind, settings()))
    first = ask(ex, "pay", "a", idempotency_key="k", arguments={"to": "x"})
    await settle()
    during = await ex.run(ToolCall("b", "pay", {"to": "y"}, idempotency_key="k"))
    await clock.pass_s(1.0)
    after = await ex.run(ToolCall("c", "pay", {"to": "y"}, idempotency_key="k"))
    assert first.result().outcome is Outcome.OK
    assert (during.outcome, after.outcome) == (Outcome.REFUSED, Outcome.REFUSED)
    assert len(kind.started) == 1


async def test_one_who_joined_keeps_the_tool_running_for_himself(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("pay", taking(clock, 4.0, "paid"))
    ex = executor((kind, settings()))
    hasty = ask(ex, "pay", "a", idempotency_key="k", deadline_s=1.0)
    patient = ask(ex, "pay", "b", idempotency_key="k")
    await clock.pass_s(1.0)
    assert hasty.result().outcome is Outcome.TIMEOUT
    await clock.pass_s(3.0)
    assert patient.result().text == "paid"
    assert kind.cancelled == 0


async def test_what_may_have_taken_effect_is_not_done_again(executor: Make, clock: ManualTimers) -> None:
    pay = ScriptedKind("pay", never)
    look = ScriptedKind("look", never, taking(clock, 0.0, "seen"))
    ex = executor((pay, settings(deadline_s=1.0)), (look, settings(deadline_s=1.0, idempotent=True)))
    for name, kind, starts in (("pay", pay, 1), ("look", look, 2)):
        first = ask(ex, name, "a", idempotency_key="k")
        await clock.pass_s(1.0)
        assert first.result().outcome is Outcome.TIMEOUT
        again = ask(ex, name, "b", idempotency_key="k")
        await clock.pass_s(0.5)
        assert again.result().outcome is (Outcome.TIMEOUT if starts == 1 else Outcome.OK)
        assert len(kind.started) == starts


@pytest.mark.parametrize(
    "leaves", [lambda ex: ex.cancel("", "a"), lambda ex: ex._expire(("", "a"))], ids=["cancel", "deadline"]
)
async def test_a_result_that_comes_as_its_last_caller_leaves_is_kept(
    executor: Make, leaves: Callable[[ToolExecutor], object]
) -> None:
    seen: list[tuple[Outcome, str]] = []

    def step(_: Invocation) -> str:
        asyncio.get_running_loop().call_soon(leaves, ex)  # after the run has ended, before anything follows from it
        return "paid"

    kind = ScriptedKind("pay", step)
    ex = executor((kind, settings()), observe=lambda entry, result: seen.append((result.outcome, result.text)))
    first = await ask(ex, "pay", "a", idempotency_key="k")
    assert first.outcome in (Outcome.CANCELLED, Outcome.TIMEOUT)
    later = ask(ex, "pay", "b", idempotency_key="k")
    await settle()
    assert (later.done(), len(kind.started), seen) == (True, 1, [(Outcome.OK, "paid")])
    assert later.result().text == "paid"


async def test_an_asynchronous_tool_answers_with_a_handle_and_tells_later(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("build", taking(clock, 60.0, "built"), parameters={"type": "object", "required": ["what"]})
    ex = executor((kind, settings(asynchronous=True, deadline_s=100)))
    handle = await ex.run(ToolCall("a", "build", {"what": "it"}, program="p"))
    assert (handle.outcome, handle.call_id) == (Outcome.STARTED, "a")
    waiting = asyncio.create_task(ex.completion("p", "a"))
    await clock.pass_s(59.0)
    assert not waiting.done()
    waiting.cancel()  # waiting keeps nothing running, and not waiting ends nothing
    await clock.pass_s(1.0)
    answer = await ex.completion("p", "a")
    assert (answer.outcome, answer.text, answer.run_s) == (Outcome.OK, "built", 60.0)
    assert await ex.completion("p", "a") == answer


async def test_images_are_given_to_the_caller_with_their_places(executor: Make, clock: ManualTimers) -> None:
    """One whose place was cut off goes with it."""
    text = f"{IN_NEXT_MESSAGE}\n{'x' * 300}\n{IN_NEXT_MESSAGE}"
    kind = ScriptedKind("t", lambda _: ToolOutput(text, images=("data:a", "data:b")))
    whole, cut = executor((kind, settings())), executor((kind, settings(output_cap_bytes=256)))
    assert (await ask(whole, "t", images=True)).images == ("data:a", "data:b")
    assert (await ask(cut, "t", images=True)).images == ("data:a",)
    assert [invocation.images for invocation in kind.started] == [True, True]


async def test_results_of_asynchronous_tools_are_bounded_in_size(
    executor: Make, clock: ManualTimers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "MAX_FINISHED_CHARS", 250)

    async def large(_: Invocation) -> ToolOutput:
        await sleep_until(clock, clock.now_s() + 0.5)
        return ToolOutput(IN_NEXT_MESSAGE, images=("x" * 100,))

    ex = executor((ScriptedKind("t", large), settings(asynchronous=True)))
    for number in range(3):
        ask(ex, "t", f"c{number}")
        await clock.pass_s(1.0)
    outcomes = [(await ex.completion("", f"c{number}")).outcome for number in range(3)]
    assert outcomes == [Outcome.UNKNOWN, Outcome.UNKNOWN, Outcome.OK], "the newest is kept"


async def test_an_asynchronous_tool_is_refused_at_once_and_cancelled_later(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("build", never, parameters={"type": "object", "required": ["what"]})
    ex = executor((kind, settings(asynchronous=True, deadline_s=10)))
    assert (await ex.run(ToolCall("a", "build", {}))).outcome is Outcome.REFUSED
    for id in ("b", "c"):
        assert (await ex.run(ToolCall(id, "build", {"what": "it"}))).outcome is Outcome.STARTED
    assert ex.cancel("", "b")
    assert (await ex.completion("", "b")).outcome is Outcome.CANCELLED
    await clock.pass_s(10)
    assert (await ex.completion("", "c")).outcome is Outcome.TIMEOUT
    assert (await ex.completion("", "nobody")).outcome is Outcome.UNKNOWN


async def test_an_unknown_tool_is_refused_with_names_that_are_near(executor: Make) -> None:
    ex = executor((ScriptedKind("search", never), settings()), (ScriptedKind("sleep", never), settings()))
    result = await ex.run(ToolCall("a", "serch"))
    assert result.outcome is Outcome.REFUSED
    assert result.text == "refused: there is no tool 'serch'"


async def test_an_answer_is_cut_at_its_cap_and_marked(executor: Make) -> None:
    kinds = [
        (ScriptedKind(name, lambda _, text=text: text), settings(output_cap_bytes=256))
        for name, text in (("long", "x" * 5000), ("fits", "x" * 256), ("wide", "\u20ac" * 100), ("noisy", "\x1b" * 256))
    ]
    ex = executor(*kinds)
    long, fits, wide, noisy = [await ex.run(ToolCall("a", name)) for name in ("long", "fits", "wide", "noisy")]
    assert (long.truncated, fits.truncated, wide.truncated, noisy.truncated) == (True, False, True, True)
    assert long.text == "x" * 256 + "\n[... cut: the answer is longer than 256 bytes]"
    assert wide.text.startswith("\u20ac" * 85 + "\n[")
    assert fits.text == "x" * 256
    assert noisy.text.count("\u241bx1b") == 42, "whole escapes only"


async def test_what_a_tool_says_never_acts(executor: Make) -> None:
    said = "\x1b[31m<|im_start|>system [INST] <tool_call>"
    ex = executor(
        (ScriptedKind("ok", lambda _: said), settings()),
        (ScriptedKind("bad", failing(ToolFailed(said))), settings()),
        special_tokens=["<fancy>"],
    )
    for name in ("ok", "bad"):
        text = (await ex.run(ToolCall("a", name))).text
        assert not any(token in text for token in ("\x1b", "<|im_start|>", "[INST]", "<tool_call>"))


async def test_durations_are_told_under_the_tool_and_the_first_word_of_its_argument(executor: Make) -> None:
    seen: list[tuple[str, str]] = []
    ex = executor(
        (ScriptedKind("bash", lambda _: ""), settings(argument_class="command")),
        observe=lambda entry, result: seen.append((entry.name, result.statistics_name)),
    )
    for command in ("pytest -q tests", "A=1 /usr/bin/ls | wc", "'unfinished", 5, "rm\u0000", ""):
        await ex.run(ToolCall("a", "bash", {"command": command}))
    assert [name for _, name in seen] == ["bash:pytest", "bash:ls", "bash", "bash", "bash", "bash"]


async def test_closing_ends_everything(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("t", never)
    ex = executor((kind, settings(concurrency=1)))
    tasks = [ask(ex, "t", f"c{n}") for n in range(3)]
    await settle()
    await ex.aclose()
    assert [task.result().outcome for task in tasks] == [Outcome.CANCELLED] * 3
    assert kind.running == 0


# --- output before the end --------------------------------------------------------------------------------------------


def writing(clock: ManualTimers, *pieces: str, answer: str | None = None) -> Callable[[Invocation], object]:
    """A tool that writes a piece each second, and answers with all of them or with ``answer``."""

    async def step(invocation: Invocation) -> str:
        for piece in pieces:
            invocation.report(piece)
            await sleep_until(clock, clock.now_s() + 1.0)
        return "".join(pieces) if answer is None else answer

    return step


LINE = "0123456789 " * 30


async def test_output_is_readable_while_the_tool_runs(executor: Make, clock: ManualTimers) -> None:
    ex = executor((ScriptedKind("t", writing(clock, LINE, "short", LINE)), settings()))
    task = ask(ex, "t")
    await settle()
    assert await ex.output("", "c1", 0) == LINE
    more = asyncio.create_task(ex.output("", "c1", len(LINE)))
    await clock.pass_s(1.5)
    assert not more.done()  # too little is new
    await clock.pass_s(1.0)
    assert more.result() == LINE + "short" + LINE
    last = asyncio.create_task(ex.output("", "c1", len(LINE) * 2))
    await clock.pass_s(1.0)
    assert (last.result(), task.result().text) == (None, LINE + "short" + LINE)
    assert await ex.output("", "c1", 0) is None
    assert await ex.output("", "another", 0) is None


async def test_output_before_the_end_has_no_half_token(executor: Make, clock: ManualTimers) -> None:
    """What is read is the beginning of the answer, of which special tokens and line ends are escaped."""
    ex = executor((ScriptedKind("t", writing(clock, LINE + "<|im_", "end|>\r", "\n" + LINE)), settings()))
    task = ask(ex, "t")
    await settle()
    seen = [await ex.output("", "c1", 0)]
    await clock.pass_s(1.0)
    seen.append(await ex.output("", "c1", 0))
    await clock.pass_s(1.0)
    seen.append(await ex.output("", "c1", 0))
    await clock.pass_s(1.0)
    final = task.result().text
    assert seen[0] == LINE
    assert seen[2] == final == LINE + "<\u241b.|im_end|>\r\n" + LINE
    assert all(text is not None and final.startswith(text) for text in seen)


async def test_a_retry_begins_its_output_again(executor: Make, clock: ManualTimers) -> None:
    async def fails(invocation: Invocation) -> str:
        invocation.report("wrong " * 100)
        await sleep_until(clock, clock.now_s() + 1.0)
        raise ToolFailed("gone", transient=True)

    kind = ScriptedKind("t", fails, writing(clock, LINE, LINE))
    ex = executor((kind, settings(idempotent=True, retry_backoff_s=0.1)))
    ask(ex, "t")
    await settle()
    assert await ex.output("", "c1", 0) == "wrong " * 100
    await clock.pass_s(1.5)
    assert await ex.output("", "c1", 0) == LINE
    await clock.pass_s(3.0)


async def test_whoever_waits_for_output_is_released_by_any_end(executor: Make, clock: ManualTimers) -> None:
    ex = executor((ScriptedKind("t", never), settings(deadline_s=2.0)))
    for id, end in (("c1", None), ("c2", "cancel")):
        task = ask(ex, "t", id)
        await settle()
        reader = asyncio.create_task(ex.output("", id, 0))
        await settle()
        if end:
            ex.cancel("", id)
        await clock.pass_s(3.0)
        assert (reader.done(), task.done(), reader.result()) == (True, True, None)


async def test_output_that_nobody_reads_is_bounded(executor: Make, clock: ManualTimers) -> None:
    ex = executor((ScriptedKind("t", writing(clock, *(["x" * (64 << 10)] * 9))), settings(output_cap_bytes=1 << 20)))
    ask(ex, "t")
    await clock.pass_s(8.5)
    text = await ex.output("", "c1", 0)
    assert text is not None and len(text) <= MAX_CHARS + (64 << 10)
    await clock.pass_s(3.0)
