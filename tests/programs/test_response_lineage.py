"""Responses whose program is found by the items of their input."""

from typing import Any

import pytest

from cluster.core.lineage import Attributed, Attribution, LineageIndex
from cluster.core.program import ProgramIdentity

NOBODY = ProgramIdentity()
TOOLS = [{"type": "function", "name": "look"}]

Item = dict[str, Any]


def user(text: str) -> Item:
    return {"role": "user", "content": text}


def says(text: str) -> Item:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "look",
    "arguments": "{}",
    "status": "completed",
}
SEEN = {"type": "function_call_output", "call_id": "c1", "output": "a bird"}


def served(
    index: LineageIndex, *items: Item, identity: ProgramIdentity = NOBODY, new_id: str | None = None, **fields: Any
) -> Attributed:
    """A turn that has ended."""
    turn = index.attribute(identity, {"model": "m", "input": list(items), **fields}, new_id)
    index.ended(turn)
    index.check_integrity()
    return turn


@pytest.mark.parametrize(
    "answer",
    [
        (says("b"),),
        ({"type": "reasoning", "id": "rs_1", "summary": []}, says("b")),
        ({"type": "reasoning", "id": "rs_1", "summary": []}, CALL, SEEN),
        ({"type": "item_reference", "id": "msg_1"},),
        ({"type": "mcp_list_tools", "server_label": "s", "tools": []}, {"type": "mcp_call", "id": "m", "name": "x"}),
    ],
)
def test_a_history_that_goes_on_after_an_answer_is_the_next_turn(answer: tuple[Item, ...]) -> None:
    index = LineageIndex()
    first = served(index, user("a"), instructions="Be kind.")
    second = served(index, user("a"), *answer, user("c"), instructions="Be kind.")
    assert (second.how, second.identity) == (Attribution.CONTINUED, first.identity)
    assert served(index, user("a"), *answer, user("c"), says("d"), user("e"), instructions="Be kind.").identity == (
        first.identity
    )


@pytest.mark.parametrize(
    ("items", "fields"),
    [
        ((user("a"), SEEN), {}),
        ((user("a"), user("no answer between")), {}),
        ((user("other"), says("b"), user("c")), {}),
        ((user("a"), says("b"), user("c")), {"instructions": "Be rude."}),
        ((user("a"), says("b"), user("c")), {"model": "other"}),
    ],
)
def test_other_histories_begin_other_programs(items: tuple[Item, ...], fields: dict[str, Any]) -> None:
    index = LineageIndex()
    first = served(index, user("a"))
    other = served(index, *items, **fields)
    assert other.how is Attribution.BEGUN and other.identity != first.identity


@pytest.mark.parametrize(
    ("sent", "sent_again"),
    [
        (
            user("a"),
            {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        ),
        (CALL, {name: value for name, value in CALL.items() if name not in ("id", "status")}),
        (
            says("a"),
            {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
        ),
    ],
)
def test_what_clients_change_in_old_items_does_not_matter(sent: Item, sent_again: Item) -> None:
    index = LineageIndex()
    first = served(index, user("0"), sent, user("z"))
    second = served(index, user("0"), sent_again, user("z"), says("b"), user("c"))
    assert (second.how, second.identity) == (Attribution.CONTINUED, first.identity)


def test_a_text_as_input_is_a_message_of_the_user() -> None:
    index = LineageIndex()
    first = index.attribute(NOBODY, {"model": "m", "input": "a"})
    index.ended(first)
    assert served(index, user("a"), says("b"), user("c")).identity == first.identity


def test_a_compacted_history_is_still_its_program() -> None:
    index = LineageIndex()
    first = served(index, user("a"))
    served(index, user("a"), says("b"), user("c"))
    compacted = served(index, user("a"), user("c"), {"type": "compaction", "encrypted_content": "x"}, user("d"))
    assert (compacted.how, compacted.identity) == (Attribution.REWRITTEN, first.identity)


def test_a_program_that_begins_gets_the_id_that_is_given() -> None:
    index = LineageIndex()
    assert served(index, user("a"), new_id="resp_1").identity.program_id == "resp_1"
    later = index.attribute(NOBODY, {"model": "m", "input": [user("a"), says("b"), user("c")]}, "resp_2")
    assert later.identity.program_id == "resp_1"
    fork = served(index, user("a"), says("b"), user("x"), new_id="resp_3").identity
    assert (fork.program_id, fork.parent_id) == ("resp_3", "resp_1")


def test_a_side_call_of_a_session_is_a_program_of_its_own() -> None:
    index, session = LineageIndex(), ProgramIdentity("session")
    served(index, user("a"), identity=session, instructions="You are an agent.", tools=TOOLS)
    title = served(index, user("Title of: a"), identity=session, instructions="You write titles.")
    assert (title.how, title.identity.parent_id) == (Attribution.SIDE_CALL, "session")


def test_a_response_that_continues_a_stored_one_is_no_side_call() -> None:
    index, session = LineageIndex(), ProgramIdentity("session")
    served(index, user("a"), identity=session, instructions="You are an agent.", tools=TOOLS)
    later = served(index, user("b"), identity=session, previous_response_id="resp_1")
    assert (later.how, later.identity) == (Attribution.NAMED, session)
