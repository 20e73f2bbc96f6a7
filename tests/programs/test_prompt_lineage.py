"""Completions whose program is found by their prompts."""

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.completion_parts import completion_parts
from cluster.core.lineage import Attributed, Attribution, LineageIndex
from cluster.core.program import ProgramIdentity
from cluster.core.prompt_lineage import ANSWER_BYTES, BLOCK_BYTES, prompt_of

NOBODY = ProgramIdentity()
LONG = "A long system prompt. " * 200


def begun(index: LineageIndex, prompt: Any, *, tenant: str = "default", **fields: Any) -> Attributed:
    turn = index.attribute(ProgramIdentity(tenant=tenant), {"model": "m", "prompt": prompt, **fields})
    index.check_integrity()
    return turn


def served(
    index: LineageIndex, prompt: Any, text: str = "", ids: list[int] | None = None, *, tenant: str = "default"
) -> Attributed:
    """A turn that has ended."""
    turn = begun(index, prompt, tenant=tenant)
    answered(index, turn, text, ids)
    return turn


def answered(index: LineageIndex, turn: Attributed, text: str, ids: list[int] | None = None) -> None:
    assert turn.by_prompt is not None
    turn.by_prompt.received(text, ids or [])
    index.ended(turn)
    index.check_integrity()


def id_of(turn: Attributed) -> str:
    assert turn.identity.program_id is not None
    return turn.identity.program_id


@pytest.mark.parametrize("start", ["Q", "Question: what?", "x" * BLOCK_BYTES, LONG, "ß" * BLOCK_BYTES])
def test_a_prompt_that_begins_with_the_last_prompt_and_its_answer_is_the_next_turn(start: str) -> None:
    index = LineageIndex()
    first = served(index, start, " Look.")
    second = served(index, start + " Look.\nObservation: a bird", "It is\nbrown. " + LONG)
    third = served(index, start + " Look.\nObservation: a bird" + "It is\nbrown. " + LONG + "\nObservation: 2", "Done")
    assert [first.how, second.how, third.how] == [Attribution.BEGUN, Attribution.CONTINUED, Attribution.CONTINUED]
    assert id_of(first) == id_of(second) == id_of(third)
    assert [turn.identity.first_turn for turn in (first, second, third)] == [True, False, False]
    assert len(index) == 1


def test_token_ids_are_followed_by_the_ids_of_the_answer() -> None:
    index = LineageIndex()
    start = list(range(1000))
    first = served(index, start, "text", [7, 8])
    second = served(index, [*start, 7, 8, 9], "text", [5])
    assert (second.how, id_of(second)) == (Attribution.CONTINUED, id_of(first))
    assert served(index, [[*start, 7, 8, 9, 5]]).how is Attribution.CONTINUED
    assert served(index, [*start, 7, 9]).how is Attribution.BEGUN


def test_token_ids_without_the_ids_of_the_answer_are_not_continued() -> None:
    index = LineageIndex()
    served(index, [1, 2, 3], "text")
    assert served(index, [1, 2, 3, 4]).how is Attribution.BEGUN


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("Once upon a time, in the West", {}),
        ("Once", {}),
        ("Twice there was", {}),
        ("Once there was", {"model": "other"}),
        ([79, 110, 99, 101], {}),
    ],
)
def test_other_prompts_begin_other_programs(prompt: Any, fields: dict[str, Any]) -> None:
    index = LineageIndex()
    first = served(index, "Once", " there was")
    other = begun(index, prompt, **fields)
    assert other.how is Attribution.BEGUN and id_of(other) != id_of(first)


def test_tenants_have_nothing_in_common() -> None:
    index = LineageIndex()
    served(index, "Once", " there was", tenant="one")
    assert served(index, "Once there was", tenant="two").how is Attribution.BEGUN


def test_samples_of_one_prompt_are_told_apart_by_their_answers() -> None:
    index = LineageIndex()
    samples = [begun(index, LONG) for _ in range(3)]
    for number, sample in enumerate(samples):
        answered(index, sample, f"answer {number}")
    for number in (2, 0, 1):
        assert id_of(begun(index, f"{LONG}answer {number}, then?")) == id_of(samples[number])


def test_only_an_answer_that_has_come_is_continued() -> None:
    index = LineageIndex()
    flying = begun(index, "Once")
    assert begun(index, "Once there was").how is Attribution.BEGUN
    answered(index, flying, " there")
    assert id_of(begun(index, "Once there was a time")) == id_of(flying)


@pytest.mark.parametrize("sent", ["Q:Yes. Next", "Q: Yes.\nNext", "Q:\n\nYes."])
def test_white_space_around_an_answer_does_not_matter(sent: str) -> None:
    index = LineageIndex()
    first = served(index, "Q:", " Yes.\n\n")
    assert id_of(served(index, sent)) == id_of(first)


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_answer_is_not_continued(answer: str) -> None:
    index = LineageIndex()
    served(index, "Q:", answer)
    assert served(index, "Q: more").how is Attribution.BEGUN


def test_the_longest_prompt_wins() -> None:
    index = LineageIndex()
    short = begun(index, "a")
    long = begun(index, "ab")
    answered(index, short, "b")
    answered(index, long, "c")
    assert id_of(begun(index, "abc")) == id_of(long)
    assert id_of(begun(index, "abx")) == id_of(short)


def test_the_last_prompt_again_is_a_retry_and_the_first_one_again_a_sample() -> None:
    index = LineageIndex()
    first = served(index, "a", "b")
    assert id_of(served(index, "a", "c")) != id_of(first)
    turn = begun(index, "ab?")
    assert begun(index, "ab?").how is Attribution.BEGUN  # the turn is in flight
    index.ended(turn)
    assert id_of(begun(index, "ab?")) == id_of(turn) == id_of(first)


def test_a_first_turn_that_was_not_served_is_forgotten() -> None:
    index = LineageIndex()
    index.ended(begun(index, "a"), served=False)
    index.check_integrity()
    assert len(index) == 0


def test_the_least_recently_used_program_is_forgotten() -> None:
    index = LineageIndex(max_programs=2)
    for prompt in ("a", "b", "c"):
        served(index, prompt, "!")
    assert len(index) == 2
    assert served(index, "a!").how is Attribution.BEGUN
    assert served(index, "c!").how is Attribution.CONTINUED


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [1 << 40]},
        {"prompt": [1, "a"]},
        {"prompt": {"a": 1}},
        {"prompt": 7},
        {"prompt": "\ud800"},
        {"prompt": "a", "n": 2},
        {"prompt": "a", "best_of": 2},
        {"prompt": "a", "echo": True},
    ],
)
def test_a_completion_without_one_prompt_and_one_answer_belongs_to_no_program(body: dict[str, Any]) -> None:
    assert prompt_of("t", body) is None
    index = LineageIndex()
    turn = index.attribute(NOBODY, body)
    index.ended(turn)
    assert (turn.how, turn.identity, turn.by_prompt) == (Attribution.UNKNOWN, NOBODY, None)


def test_a_program_that_is_named_is_not_looked_up() -> None:
    index = LineageIndex()
    turn = index.attribute(ProgramIdentity("p"), {"prompt": "a"})
    assert (turn.how, turn.by_prompt, len(index)) == (Attribution.NAMED, None, 0)


def test_of_an_answer_only_the_beginning_is_kept() -> None:
    turn = begun(LineageIndex(), "a")
    assert turn.by_prompt is not None
    for _ in range(3):
        assert turn.by_prompt.wants_answer
        turn.by_prompt.received("x" * (ANSWER_BYTES // 2 - 1), [])
    assert not turn.by_prompt.wants_answer
    assert turn.by_prompt.answer == b"x" * ANSWER_BYTES


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.sampled_from(["served", "failed", ""])), max_size=50)
)
def test_the_index_stays_whole_in_any_order_of_requests(steps: list[tuple[int, int, str]]) -> None:
    index, flying, names = LineageIndex(max_programs=3), [], count()
    for first, length, ends in steps:
        turn = index.attribute(NOBODY, {"prompt": f"{first}" * 400 + "ab" * length})
        flying.append(turn)
        if ends:
            done = flying.pop(next(names) % len(flying))
            assert done.by_prompt is not None
            done.by_prompt.received("a", [])
            index.ended(done, served=ends == "served")
        index.check_integrity()


def event(**choice: Any) -> bytes:
    return (
        b"data: " + json.dumps({"id": "cmpl", "choices": [{"index": 0, "logprobs": None, **choice}]}).encode() + b"\n\n"
    )


@pytest.mark.parametrize(
    ("piece", "texts", "ids"),
    [
        (json.dumps({"choices": [{"index": 0, "text": "a", "token_ids": [1, 2]}]}).encode(), ["a"], [1, 2]),
        (event(text="a") + event(text="b", token_ids=[3]) + b"data: [DONE]\n\n", ["a", "b"], [3]),
        (event(index=1, text="a"), [], []),
        (b": a comment\n\n", [], []),
        (b'data: {"choices": []}\n\n', [], []),
        (b'data: {"choices": 7}\n\n', [], []),
        (b'{"error": {"message": "no"}}', [], []),
    ],
)
def test_the_parts_of_a_completion(piece: bytes, texts: list[str], ids: list[int]) -> None:
    parts = list(completion_parts(piece))
    assert [part.text for part in parts] == texts
    assert [one for part in parts for one in part.token_ids or ()] == ids
