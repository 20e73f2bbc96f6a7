import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from cluster.core.errors import ConfigError
from cluster.offline.commands.model import app
from replicas.tiny import model
from replicas.tiny.model import SPECIAL_TOKENS, tiny_model_directory, write_tiny_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Is it raining in Zürich?"},
    {
        "role": "assistant",
        "content": "I will look.\n",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}},
            {"id": "2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": '{"rain": 0.5}'},
    {"role": "tool", "tool_call_id": "2", "content": "12:00"},
    {"role": "assistant", "content": "A little."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock", "arguments": {}}}]},
    {"role": "tool", "content": "12:05"},
]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_transformers_load_it(tiny_model: Path, tokenizer: Any) -> None:
    config = AutoConfig.from_pretrained(tiny_model)
    assert config.max_position_embeddings == 32_768 == tokenizer.model_max_length
    assert config.vocab_size == len(tokenizer)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    assert tokenizer.eos_token_id == config.eos_token_id == SPECIAL_TOKENS.index("<|im_end|>")
    raw = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert tokenizer.encode("The bridge, 1987") == raw.encode("The bridge, 1987").ids


def test_tokenizer_has_learnt_words(tokenizer: Any) -> None:
    assert len(tokenizer.encode(" the machine that returns a path")) == 6
    assert len(tokenizer.encode("12345")) == 5
    assert len(tokenizer.encode("<|im_start|>user")) == 2


@given(st.text())
def test_any_unicode_round_trips(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_template_shows_tools_calls_and_results(tokenizer: Any) -> None:
    text = render(tokenizer, CONVERSATION, tools=TOOLS, add_generation_prompt=True)
    system, user, assistant, first_result, *_ = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nAnswer briefly.\n\n")
    listed = system.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in listed.splitlines()] == TOOLS
    assert user == "<|im_start|>user\nIs it raining in Zürich?"
    assert assistant == (
        "<|im_start|>assistant\nI will look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    )
    assert first_result == '<|im_start|>tool\n<tool_response>\n{"rain": 0.5}\n</tool_response>'
    assert text.endswith("<|im_start|>assistant\n")


def test_template_without_tools_or_system_message(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert render(tokenizer, messages) == "<|im_start|>user\nHello<|im_end|>\n"
    with_tools = render(tokenizer, messages, tools=TOOLS)
    assert with_tools.startswith("<|im_start|>system\nYou may call")
    assert with_tools.endswith("<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n")


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("first", [0, 1])
def test_longer_conversation_extends_the_shorter(tokenizer: Any, tools: Any, first: int) -> None:
    messages = CONVERSATION[first:]
    for length in range(1, len(messages)):
        shorter = render(tokenizer, messages[:length], tools=tools)
        longer = render(tokenizer, messages[: length + 1], tools=tools)
        assert longer.startswith(shorter)
        if messages[length]["role"] == "assistant":
            assert longer.startswith(render(tokenizer, messages[:length], tools=tools, add_generation_prompt=True))


def test_same_seed_same_bytes_in_another_process(tiny_model: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from replicas.tiny.model import write_tiny_model;"
        "write_tiny_model(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "again")], check=True, timeout=120)
    assert contents(tmp_path / "again") == contents(tiny_model)


def test_another_seed_other_weights_same_tokens(tiny_model: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "other", seed=1)
    other, first = contents(tmp_path / "other"), contents(tiny_model)
    assert {name for name in first if other[name] != first[name]} == {"model.safetensors", "config.json"}


def test_replaces_a_tiny_model_and_leaves_nothing_beside_it(tiny_model: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", seed=1)
    (tmp_path / "model" / "left over").touch()
    write_tiny_model(tmp_path / "model")
    assert contents(tmp_path / "model") == contents(tiny_model)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("content", ["", "{}", "[]", "\x00"])
def test_refuses_what_is_not_a_tiny_model(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="not a tiny model"):
        write_tiny_model(tmp_path)
    assert contents(tmp_path) == {"config.json": content.encode()}
    with pytest.raises(ConfigError):
        write_tiny_model(tmp_path / "config.json")


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_CORPUS", ("prose.txt",))
    with pytest.raises(ValueError, match="too short"):
        write_tiny_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_cache_is_made_once_by_concurrent_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAESURA_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: tiny_model_directory(), range(4)))
    assert len(set(found)) == 1
    assert list((tmp_path / "cache").iterdir()) == found[:1]
    made = (found[0] / "config.json").stat().st_mtime_ns
    assert tiny_model_directory() == found[0]
    assert (found[0] / "config.json").stat().st_mtime_ns == made


def test_command(tiny_model: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tiny", str(tmp_path / "a" / "model")])
    assert result.exit_code == 0, result.output
    assert contents(tmp_path / "a" / "model") == contents(tiny_model)
    (tmp_path / "file").touch()
    assert isinstance(CliRunner().invoke(app, ["tiny", str(tmp_path / "file" / "model")]).exception, ConfigError)


@pytest.mark.engine
def test_vllm_generates_from_it(tiny_model: Path) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(tiny_model), enforce_eager=True, block_size=32, max_model_len=2048, disable_log_stats=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    first, second = llm.generate(["The clockmaker's shop", "def main():"], greedy, use_tqdm=False)
    assert len(first.outputs[0].token_ids) == 32
    assert first.outputs[0].text != second.outputs[0].text
    again = llm.generate([{"prompt_token_ids": list(first.prompt_token_ids or [])}], greedy, use_tqdm=False)
    assert again[0].outputs[0].token_ids == first.outputs[0].token_ids
    [reply] = llm.chat(CONVERSATION[:2], SamplingParams(max_tokens=8), tools=TOOLS, use_tqdm=False)
    assert 1 <= len(reply.outputs[0].token_ids) <= 8


@pytest.mark.engine
def test_vllms_hermes_parser_reads_what_the_template_writes(tokenizer: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    asked = render(tokenizer, CONVERSATION[:2], add_generation_prompt=True)
    reply = render(tokenizer, CONVERSATION[:3]).removeprefix(asked).removesuffix("<|im_end|>\n")
    parser = ToolParserManager.get_tool_parser("hermes")(tokenizer)
    parsed = parser.extract_tool_calls(reply, ChatCompletionRequest(messages=[], model=""))
    assert parsed.content == CONVERSATION[2]["content"]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in parsed.tool_calls] == [
        ("weather", {"city": "Zürich"}),
        ("clock", {}),
    ]
