"""The built-in model's tool loop: what it writes for a prompt, and how its scripts follow vLLM's batch."""

import json
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from replicas.tiny.model import END, tiny_model_directory
from replicas.tiny.tool_arguments import arguments_of
from replicas.tiny.tool_loop import ANSWER, CALLS, ToolLoop

SCHEMAS: dict[str, dict[str, Any]] = {
    "none": {},
    "command": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    "argv": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"],
    },
    "enum": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]},
    "bounds": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 3},
            "b": {"type": "number", "exclusiveMinimum": 1},
            "c": {"type": "integer", "maximum": -5},
            "d": {"type": "string", "minLength": 9},
            "e": {"type": "string", "maxLength": 2},
            "f": {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
        },
        "required": ["a", "b", "c", "d", "e", "f"],
        "additionalProperties": False,
    },
    "nullable": {
        "type": "object",
        "properties": {"x": {"anyOf": [{"type": "null"}, {"type": "string"}]}, "y": {"type": ["string", "null"]}},
        "required": ["x", "y"],
    },
    "reference": {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}},
        "required": ["at"],
        "$defs": {"Place": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}},
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("call", range(CALLS))
def test_arguments_are_valid(name: str, call: int) -> None:
    jsonschema.validate(arguments_of(SCHEMAS[name], call), SCHEMAS[name])


def test_optional_properties_are_left_out_and_recursion_ends() -> None:
    recursive = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    assert arguments_of({"type": "object", "properties": {"command": {"type": "string"}}}, 0) == {}
    assert "next" in arguments_of(recursive, 0)


def test_calls_of_a_loop_differ() -> None:
    assert len({arguments_of(SCHEMAS["command"], call)["command"] for call in range(CALLS)}) == CALLS


class Engine:
    """The processor with the real tokenizer and template, as vLLM calls it."""

    def __init__(self) -> None:
        directory = tiny_model_directory()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        model = type("ModelConfig", (), {"model": str(directory)})
        self.loop = ToolLoop(type("VllmConfig", (), {"model_config": model}), torch.device("cpu"), False)  # type: ignore[arg-type]

    def prompt(self, messages: list[dict[str, Any]], *tools: str) -> list[int]:
        offered = [{"type": "function", "function": {"name": one, "parameters": SCHEMAS["command"]}} for one in tools]
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, tools=offered or None, add_generation_prompt=True, return_dict=False
        )
        return ids

    def step(self, rows: int, **update: Any) -> list[int]:
        changes = {"batch_size": rows, "removed": [], "added": [], "moved": []} | update
        self.loop.update_state(BatchUpdate(**changes) if update else None)
        logits = self.loop.apply(torch.zeros(rows, len(self.tokenizer)))
        return [int(row.argmax()) if row.any() else -1 for row in logits]

    def answer(self, prompt: list[int], begun: int = 0) -> str:
        """Write until nothing is intended; the first ``begun`` tokens were written by another replica."""
        written: list[int] = []
        (token,) = self.step(1, added=[(0, None, prompt, written)])
        while token >= 0:
            written.append(token)
            if len(written) == begun:
                written, prompt = [], prompt + written
                (token,) = self.step(1, added=[(0, None, prompt, written)])
            else:
                (token,) = self.step(1)
        text: str = self.tokenizer.decode(written)
        return text


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


USER = {"role": "user", "content": "What is here?"}
ROUND = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "ls", "arguments": "{}"}}]}]
RESULT = [{"role": "tool", "content": "a.txt"}]


def called(text: str) -> dict[str, Any]:
    call: dict[str, Any] = json.loads(text.removeprefix("<tool_call>\n").removesuffix(f"\n</tool_call>{END}"))
    return call


def test_it_calls_an_offered_tool_and_then_stops(engine: Engine) -> None:
    messages: list[dict[str, Any]] = [USER]
    commands = []
    for _ in range(CALLS):
        call = called(engine.answer(engine.prompt(messages, "edit", "Bash")))
        assert call["name"] == "Bash"
        commands.append(call["arguments"]["command"])
        messages += ROUND + RESULT
    assert len(set(commands)) == CALLS
    assert engine.answer(engine.prompt(messages, "edit", "Bash")) == ANSWER + END
    assert called(engine.answer(engine.prompt([*messages, USER], "edit")))["name"] == "edit"


def test_nothing_is_intended_without_tools(engine: Engine) -> None:
    assert engine.answer(engine.prompt([USER])) == ""


def test_a_resumed_stream_is_continued(engine: Engine) -> None:
    prompt = engine.prompt([USER], "ls")
    rest = engine.answer(prompt, begun=5)
    assert rest.endswith(END)
    assert engine.answer(prompt).endswith(rest)


def test_a_grammar_prevails(engine: Engine) -> None:
    written: list[int] = []
    (token,) = engine.step(1, added=[(0, None, engine.prompt([USER], "ls"), written)])
    logits = torch.zeros(1, len(engine.tokenizer))
    logits[0, token] = -torch.inf
    assert engine.loop.apply(logits)[0, token] == -torch.inf
    written.append(token + 1)
    assert engine.step(1) == [-1]


def test_scripts_follow_the_rows(engine: Engine) -> None:
    tools, plain = engine.prompt([USER], "ls"), engine.prompt([USER])
    (first, other) = engine.step(2, added=[(0, None, tools, []), (1, None, plain, [])])
    assert first >= 0 > other
    assert engine.step(2, moved=[(0, 1, MoveDirectionality.SWAP)]) == [-1, first]
    assert engine.step(2, removed=[0], moved=[(1, 0, MoveDirectionality.UNIDIRECTIONAL)]) == [first, -1]
    assert engine.step(2, removed=[0]) == [-1, -1]
