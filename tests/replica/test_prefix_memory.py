"""Which beginnings of prompts a replica remembers within its bound."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.replica_snapshot import MAX_PREFIXES, PREFIX_BLOCK_TOKENS, prefix_blocks, prompt_of, unpack_blocks
from replicas.router_side import PrefixMemory


def prompt(number: int, blocks: int) -> list[int]:
    return [number] * (blocks * PREFIX_BLOCK_TOKENS)


def known(memory: PrefixMemory) -> frozenset[int]:
    return unpack_blocks(memory.packed())


def test_a_prompt_that_was_served_is_known_by_its_whole_blocks() -> None:
    memory = PrefixMemory()
    memory.serve("a", [*prompt(1, 3), 5, 6])
    assert known(memory) == frozenset(prefix_blocks(prompt(1, 3)))


def test_a_shared_beginning_outlives_any_number_of_prompts_of_one_program() -> None:
    memory = PrefixMemory(max_blocks=10)
    memory.serve("a", prompt(1, 3) + prompt(2, 2))
    memory.serve("b", prompt(1, 3) + prompt(3, 2))
    for number in range(100):
        memory.serve(f"lone-{number}", prompt(10 + number, 8))
    assert frozenset(prefix_blocks(prompt(1, 3))) <= known(memory)
    assert len(known(memory)) == 10


def test_later_turns_of_one_program_do_not_make_its_prompt_shared() -> None:
    memory = PrefixMemory(max_blocks=4)
    for _ in range(5):
        memory.serve("a", prompt(1, 4))
    memory.serve("b", prompt(2, 4))
    assert known(memory) == frozenset(prefix_blocks(prompt(2, 4)))


def test_turns_of_no_program_are_each_one() -> None:
    memory = PrefixMemory(max_blocks=4)
    memory.serve(None, prompt(1, 4))
    memory.serve(None, prompt(1, 4))
    memory.serve(None, prompt(2, 4))
    assert known(memory) == frozenset(prefix_blocks(prompt(1, 4)))


def test_of_a_prompt_too_long_the_beginning_stays() -> None:
    memory = PrefixMemory(max_blocks=3)
    memory.serve("a", prompt(1, 9))
    assert known(memory) == frozenset(prefix_blocks(prompt(1, 3)))


def test_what_several_programs_share_comes_first() -> None:
    memory = PrefixMemory()
    memory.serve("a", prompt(1, 2))
    memory.serve("b", prompt(1, 2))
    memory.serve("c", prompt(2, 1))
    shared, once = prefix_blocks(prompt(1, 2)), prefix_blocks(prompt(2, 1))
    packed = memory.packed()
    assert [unpack_blocks(packed[i : i + 8]) for i in range(0, len(packed), 8)] == [{n} for n in (*shared, *once)]


def test_a_program_whose_text_is_known_is_found_by_another_with_the_same_tools() -> None:
    tools = [{"type": "function", "function": {"name": "bash", "description": "x" * 900}}]
    memory = PrefixMemory()
    memory.serve("a", prompt_of({"tools": tools, "messages": [{"role": "user", "content": "one"}]}))
    asked = prefix_blocks(prompt_of({"tools": tools, "messages": [{"role": "user", "content": "two" * 500}]}))
    assert [block in known(memory) for block in asked[:3]] == [True] * 3
    assert asked[-1] not in known(memory)


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.fixed_dictionaries({}, optional={"prompt": JSON, "messages": JSON, "tools": JSON}), max_size=5))
def test_no_body_is_too_strange(bodies: list[dict[str, Any]]) -> None:
    memory = PrefixMemory()
    for number, body in enumerate(bodies):
        memory.serve(f"p{number}", prompt_of(body))
    assert len(known(memory)) <= MAX_PREFIXES
