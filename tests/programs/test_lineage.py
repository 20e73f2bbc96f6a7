"""Programs that are found by their messages alone, and side calls of programs that are named."""

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.lineage import MAX_HOLDERS, MAX_POINTS, Attributed, Attribution, LineageIndex
from cluster.core.program import ProgramIdentity

NOBODY = ProgramIdentity()
SYSTEM = {"role": "system", "content": "You are an agent."}
TOOLS = [{"type": "function", "function": {"name": "ls"}}]

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def body(*messages: Message, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def served(index: LineageIndex, *messages: Message, identity: ProgramIdentity = NOBODY, **fields: Any) -> Attributed:
    """A turn that has ended."""
    turn = index.attribute(identity, body(*messages, **fields))
    index.ended(turn)
    index.check_integrity()
    return turn


def id_of(turn: Attributed) -> str:
    assert turn.identity.program_id is not None
    return turn.identity.program_id


def test_a_request_that_extends_the_last_one_by_an_answer_is_the_next_turn() -> None:
    index = LineageIndex()
    first = served(index, SYSTEM, user("a"))
    second = served(index, SYSTEM, user("a"), answer("b"), {"role": "tool", "tool_call_id": "1", "content": "c"})
    third = served(
        index,
        SYSTEM,
        user("a"),
        answer("b"),
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        answer("d"),
        user(""),
    )
    assert [first.how, second.how, third.how] == [Attribution.BEGUN, Attribution.CONTINUED, Attribution.CONTINUED]
    assert id_of(first) == id_of(second) == id_of(third)


@pytest.mark.parametrize(
    "request_body",
    [
        body(user("other")),
        body(SYSTEM, user("a")) | {"model": "other"},
        body(SYSTEM, user("a"), user("no answer between")),
        body(user("a"), SYSTEM),
    ],
)
def test_other_messages_begin_another_program(request_body: dict[str, Any]) -> None:
    index = LineageIndex()
    first = served(index, SYSTEM, user("a"))
    other = index.attribute(NOBODY, request_body)
    assert other.how is Attribution.BEGUN
    assert id_of(other) != id_of(first)


def test_tenants_have_nothing_in_common() -> None:
    index = LineageIndex()
    first = served(index, user("a"), identity=ProgramIdentity(tenant="one"))
    other = served(index, user("a"), answer("b"), user("c"), identity=ProgramIdentity(tenant="two"))
    assert other.how is Attribution.BEGUN and id_of(other) != id_of(first)


@pytest.mark.parametrize(
    ("sent", "sent_again"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": "a"},
        ),
        ({"role": "user", "content": "a", "name": None}, {"content": "a", "role": "user"}),
    ],
)
def test_what_clients_change_in_old_messages_does_not_matter(sent: Message, sent_again: Message) -> None:
    index = LineageIndex()
    first = served(index, sent)
    assert id_of(served(index, sent_again, answer("b"), user("c"))) == id_of(first)


def test_an_answer_without_its_reasoning_is_the_same_answer() -> None:
    index = LineageIndex()
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    with_reasoning = [
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "b"}]},
    ]
    for number, message in enumerate(with_reasoning):
        first = served(index, user(f"{number}"))
        second = served(index, user(f"{number}"), message, user("c"))
        third = served(index, user(f"{number}"), answer("b"), user("c"), answer("d"), user("e"))
        assert id_of(first) == id_of(second) == id_of(third)
        assert third.how is Attribution.CONTINUED


def test_samples_of_one_prompt_are_programs_of_their_own() -> None:
    index = LineageIndex()
    samples = [index.attribute(NOBODY, body(user("a"))) for _ in range(3)]
    assert len({id_of(one) for one in samples}) == 3
    index.ended(samples[1])
    continued = index.attribute(NOBODY, body(user("a"), answer("b"), user("c")))
    assert id_of(continued) == id_of(samples[1])  # only its answer has come
    index.ended(samples[0])
    assert id_of(index.attribute(NOBODY, body(user("a"), answer("x"), user("y")))) == id_of(samples[0])


def test_a_second_continuation_while_the_first_is_in_flight_is_a_fork() -> None:
    index = LineageIndex()
    first = served(index, user("a"))
    running = index.attribute(NOBODY, body(user("a"), answer("b"), user("c")))
    fork = index.attribute(NOBODY, body(user("a"), answer("b"), user("another way")))
    assert id_of(running) == id_of(first) != id_of(fork)
    assert fork.how is Attribution.FORKED
    assert fork.identity.parent_id == id_of(first)
    index.ended(fork)
    index.ended(running)
    own = served(index, user("a"), answer("b"), user("another way"), answer("d"), user("e"))
    assert id_of(own) == id_of(fork)


def test_a_repeated_turn_belongs_to_its_program_unless_it_is_still_in_flight() -> None:
    index = LineageIndex()
    history = (user("a"), answer("b"), user("c"))
    served(index, user("a"))
    turn = index.attribute(NOBODY, body(*history))
    assert index.attribute(NOBODY, body(*history)).how is Attribution.FORKED
    index.ended(turn)
    assert id_of(served(index, *history)) == id_of(turn)


def test_a_first_turn_that_failed_is_begun_again_when_it_is_repeated() -> None:
    index = LineageIndex()
    failed = index.attribute(NOBODY, body(user("a")))
    index.ended(failed, served=False)
    assert len(index) == 0
    assert id_of(served(index, user("a"))) == id_of(failed)


def test_a_history_whose_middle_is_replaced_is_still_its_program() -> None:
    index = LineageIndex()
    first = served(index, SYSTEM, user("a"))
    served(index, SYSTEM, user("a"), answer("b"), user("c"))
    served(index, SYSTEM, user("a"), answer("b"), user("c"), answer("d"), user("e"))
    compacted = served(index, SYSTEM, user("a"), user("Summary: b to e."))
    assert compacted.how is Attribution.REWRITTEN
    assert id_of(compacted) == id_of(first)
    after = served(index, SYSTEM, user("a"), user("Summary: b to e."), answer("f"), user("g"))
    assert after.how is Attribution.CONTINUED and id_of(after) == id_of(first)


def test_a_prompt_that_others_begin_with_does_not_make_them_one_program() -> None:
    index = LineageIndex()
    warmed = served(index, SYSTEM, user("A long document."))
    questions = [served(index, SYSTEM, user("A long document."), user(f"Question {n}")) for n in range(3)]
    assert len({id_of(warmed), *map(id_of, questions)}) == 4


def test_examples_in_the_prompt_do_not_make_requests_one_program() -> None:
    index = LineageIndex()
    examples = (SYSTEM, user("example"), answer("right"))
    turns = [served(index, *examples, user(f"question {n}")) for n in range(3)]
    assert len({id_of(turn) for turn in turns}) == 3
    assert {turn.how for turn in turns} == {Attribution.BEGUN}


def test_another_ingress_gives_a_conversation_the_same_id() -> None:
    first = served(LineageIndex(), SYSTEM, user("a"))
    elsewhere = served(LineageIndex(), SYSTEM, user("a"), answer("b"), user("c"))
    assert id_of(first) == id_of(elsewhere)


def test_the_least_recently_used_program_is_forgotten() -> None:
    index = LineageIndex(max_programs=2)
    served(index, user("a"))
    kept = served(index, user("b"))
    served(index, user("c"))
    assert len(index) == 2
    assert id_of(served(index, user("b"), answer("x"), user("y"))) == id_of(kept)


def test_a_long_program_is_known_by_its_first_and_its_latest_requests() -> None:
    index = LineageIndex()
    messages = [user("0")]
    first = served(index, *messages)
    for number in range(3 * MAX_POINTS):
        messages += [answer(f"{number}"), user(f"{number}")]
        assert id_of(served(index, *messages)) == id_of(first)
    assert id_of(served(index, user("0"), user("summary"))) == id_of(first)


def test_more_samples_than_can_be_told_apart_are_served_all_the_same() -> None:
    index = LineageIndex()
    ids = {id_of(served(index, user("a"))) for _ in range(2 * MAX_HOLDERS)}
    assert len(ids) == 2 * MAX_HOLDERS
    continued = {id_of(served(index, user("a"), answer(f"{n}"), user("c"))) for n in range(MAX_HOLDERS)}
    assert continued <= ids and len(continued) == MAX_HOLDERS


@pytest.mark.parametrize(
    "invalid",
    [
        {},
        {"prompt": ["text", "more"]},
        {"input": ""},
        {"input": [{"type": "reasoning", "summary": []}]},
        {"input": ["text"]},
        {"input": [{"role": "user", "content": "\ud800"}]},
        {"input": [{"type": ["message"]}]},
        {"input": "text", "previous_response_id": "resp_1"},
        {"input": "text", "conversation": "conv_1"},
        {"messages": None},
        {"messages": []},
        {"messages": ["text"]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": 1 << 80}]},
    ],
)
def test_a_request_without_readable_messages_belongs_to_no_program(invalid: dict[str, Any]) -> None:
    index = LineageIndex()
    turn = index.attribute(NOBODY, invalid)
    index.ended(turn)
    assert (turn.how, turn.identity) == (Attribution.UNKNOWN, NOBODY)
    assert index.attribute(ProgramIdentity("p"), invalid).how is Attribution.NAMED


TITLE = (user("Generate a title for this conversation"), user("a"))


def test_a_side_call_is_a_program_of_one_turn_with_the_session_as_its_parent() -> None:
    index, session = LineageIndex(), ProgramIdentity("session")
    served(index, SYSTEM, user("a"), identity=session, tools=TOOLS)
    title = served(index, {"role": "system", "content": "You write titles."}, *TITLE, identity=session)
    assert title.how is Attribution.SIDE_CALL
    assert title.identity.program_id != "session"
    assert title.identity.parent_id == "session" and title.identity.last_turn
    again = served(index, SYSTEM, user("a"), answer("b"), user("c"), identity=session, tools=TOOLS)
    assert (again.how, again.identity) == (Attribution.NAMED, session)


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ((SYSTEM, user("summarise")), {}),  # the same system prompt
        (({"role": "system", "content": "x"}, user("a"), answer("b"), user("c")), {}),  # the same first message
        (({"role": "system", "content": "x"}, user("z")), {"tools": TOOLS}),  # it offers tools
    ],
)
def test_a_request_with_something_of_the_main_line_is_no_side_call(
    messages: tuple[Message, ...], fields: dict[str, Any]
) -> None:
    index, session = LineageIndex(), ProgramIdentity("session")
    served(index, SYSTEM, user("a"), identity=session, tools=TOOLS)
    assert served(index, *messages, identity=session, **fields).how is Attribution.NAMED


def test_a_session_that_never_offers_tools_has_no_side_calls() -> None:
    index, session = LineageIndex(), ProgramIdentity("session")
    served(index, SYSTEM, user("a"), identity=session)
    assert served(index, *TITLE, identity=session).how is Attribution.NAMED


def test_a_turn_without_an_answer_before_it_is_the_first_of_its_program() -> None:
    index, named = LineageIndex(), ProgramIdentity("p")
    opening, later = (SYSTEM, user("a")), (SYSTEM, user("a"), answer("b"), user("c"))
    firsts = [
        served(index, *opening),
        served(index, *opening, identity=named, tools=TOOLS),
        served(index, user("Title?"), identity=named),
        index.attribute(NOBODY, {"prompt": "x" * 400}),
    ]
    assert [turn.how for turn in firsts] == [
        Attribution.BEGUN,
        Attribution.NAMED,
        Attribution.SIDE_CALL,
        Attribution.BEGUN,
    ]
    assert all(turn.identity.first_turn for turn in firsts)
    continued = [
        served(index, *later),
        served(index, *later, identity=named, tools=TOOLS),
        served(LineageIndex(), *later),
        LineageIndex().attribute(named, {"prompt": "x" * 400}),
        LineageIndex().attribute(named, {"input": "c", "previous_response_id": "resp_1"}),
    ]
    assert not any(turn.identity.first_turn for turn in continued)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=60))
def test_the_index_stays_whole_in_any_order_of_requests(steps: list[tuple[int, int, bool]]) -> None:
    index, flying, names = LineageIndex(max_programs=3), [], count()
    for first, length, ends in steps:
        messages = [user(f"{first}")]
        for number in range(length):
            messages += [answer(f"{number % 2}"), user(f"{number}")]
        turn = index.attribute(NOBODY, body(*messages))
        assert turn.identity.program_id is not None
        flying.append(turn)
        if ends:
            index.ended(flying.pop(next(names) % len(flying)), served=bool(length % 2))
        index.check_integrity()
    for turn in flying:
        index.ended(turn)
    assert all(program.active == 0 for program in index._programs.values())
