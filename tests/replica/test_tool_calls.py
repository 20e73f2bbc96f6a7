import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cluster.durations.tool_names import MAX_NAME_LENGTH, MAX_NAMES, tool_names
from replicas.turns import MAX_READ_TOKENS, ToolNames

FORMATS = {
    "hermes": ('I look.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>', ("f",)),
    "hermes, several": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"arguments": {}, "name": "g"}</tool_call>',
        ("f", "g"),
    ),
    "hermes, no end": ('<tool_call>\n{"name": "f", "arguments": {}}\n', ("f",)),
    "hermes, cut short": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "argu',
        ("f",),
    ),
    "hermes, one malformed": (
        '<tool_call>{name}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>',
        ("g",),
    ),
    "required": ('[{"name": "f", "parameters": {"x": []}}, {"name": "g", "parameters": {}}]<|im_end|>', ("f", "g")),
    "llama json": ('{"name": "f", "parameters": {"x": "1"}}<|eot_id|>', ("f",)),
    "llama json, several": (
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}<|eom_id|>',
        ("f", "g"),
    ),
    "mistral": ('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]</s>', ("f", "f")),
    "mistral, later": ('Well.[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[ARGS]{"y": "[TOOL_CALLS]h{}"}</s>', ("f", "g")),
    "llama function": ('<function=f>{"x": 1}</function>', ("f",)),
    "qwen coder": (
        "<tool_call>\n<function=f>\n<parameter=x>\n<function=no>\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        ("f", "g"),
    ),
    "pythonic": ("[f(x='a) b(', y=[1, {'k': max(2)}]), a.g()]<|eot_id|>", ("f", "a.g")),
    "pythonic, marked": ("<|python_start|>[f()]<|python_end|>", ("f",)),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        ("f",),
    ),
    "bash": ("THOUGHT: run them\n\n```bash\ncd x && pytest -q tests\n```\n", ("cd", "pytest")),
    "sh": ("```sh\nmake || echo 'failed && gone'\n```", ("make", "echo")),
    "bash, two blocks": ("```bash\nls\n```\nand\n```bash\ngit log\n```", ("ls", "git")),
}

CLASSES = {
    '{"command": "cd /x && grep -rn y ."}': "f:cd",
    '{"command": "FOO=1 /usr/bin/make all", "timeout": 3}': "f:make",
    '{"cmd": ["bash", "-lc", "git status"]}': "f:git",
    '{"cmd": ["ls", "-l"]}': "f:ls",
    '{"command": ""}': "f",
    '{"command": 7}': "f",
    '{"command": [1, 2, 3]}': "f",
    '{"x": "ls"}': "f",
    '["ls"]': "f",
}
"""Arguments, and what is known of the tool ``f`` that is called with them."""

COMMANDS = {
    "FOO=1 BAR='a b' ./bin/run.sh --all": ("run.sh",),
    "/usr/bin/python3 -c 'print(1 && 2)'&&ls": ("python3", "ls"),
    'grep "&&" file || true': ("grep", "true"),
    "ps aux | grep x; kill 1": ("ps",),
    "ls; pwd && (cd a && make) 2>&1 | tail": ("ls", "cd", "make"),
    "# see first && fail\ngit status # and then && more\n": ("git",),
    "cd a && \\\n  make": ("cd", "make"),
    "echo don't && ls": ("echo", "ls"),
    'echo "open && ls': ("echo", "ls"),
    '"./my tool" x': ("my tool",),
    ". .venv/bin/activate && src/": (".", "src"),
    "X=1": (),
    "&& ||": (),
    "": (),
}

NO_TOOL = [
    "",
    "The result is 174.",
    '{"name": "Ida", "born": 1888}',
    '[1, 2, {"name": "f"}]',
    "[the manual](https://example.org/f(x))",
    "[f(x=1), g(",
    '{"name": 3, "arguments": {}}',
    '<tool_call>{"name": null, "arguments": {}}</tool_call>',
    '<tool_call>{"name": " \\n", "arguments": {}}</tool_call>',
    "```python\nls && pwd\n```",
    "```bash\nls && pwd",
    "use `bash` and && then",
    "to=functions.f in plain words",
]

FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {',
        "}}",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<function=f>",
        "[f(",
    ),
    *(
        "```bash\n",
        "```",
        "&&",
        "||",
        "'",
        '"',
        "\\",
        "\n",
        "[",
        "{",
        "(",
        ")",
        "<|channel|>to=functions.f",
        "#",
        "x",
        "\0",
    ),
]


@pytest.mark.parametrize(("text", "names"), FORMATS.values(), ids=FORMATS)
def test_format(text: str, names: tuple[str, ...]) -> None:
    assert tool_names(text) == names


@pytest.mark.parametrize(("arguments", "name"), CLASSES.items())
def test_a_tool_that_runs_a_command_is_known_by_it(arguments: str, name: str) -> None:
    call = f'{{"name": "f", "arguments": {arguments}}}'
    assert tool_names(f"<tool_call>{call}</tool_call>") == (name,)
    quoted = json.dumps({"name": "f", "arguments": arguments})  # as a string, as OpenAI's API has it
    assert tool_names(f"<tool_call>{quoted}</tool_call>") == (name,)


@pytest.mark.parametrize(("command", "names"), COMMANDS.items())
def test_bash_commands(command: str, names: tuple[str, ...]) -> None:
    assert tool_names(f"```bash\n{command}\n```") == names
    assert tool_names(f"So:\r\n  ```bash\r\n{command}\r\n  ```\r\n") == names


@pytest.mark.parametrize("text", NO_TOOL)
def test_no_tool(text: str) -> None:
    assert tool_names(text) == ()


def test_a_tool_call_goes_before_a_bash_block() -> None:
    assert tool_names('```bash\nls\n```\n<tool_call>{"name": "f", "arguments": {}}</tool_call>') == ("f",)


def test_names_are_bounded_and_printable() -> None:
    calls = [{"name": f"\x1b\n{'ä' * 100}", "arguments": {}}] * 100
    names = tool_names(json.dumps(calls))
    assert len(names) == MAX_NAMES
    assert set(names) == {"ä" * (MAX_NAME_LENGTH - 2)}


@given(st.one_of(st.text(), st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3))).map("".join)))
def test_any_text_is_read(text: str) -> None:
    names = tool_names(text)
    assert len(names) <= MAX_NAMES
    assert all(0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() for name in names)


@given(st.lists(st.from_regex(r"[A-Za-z_][\w.-]{0,63}", fullmatch=True), max_size=MAX_NAMES), st.text())
def test_hermes_names_come_back_whatever_the_arguments(names: list[str], argument: str) -> None:
    calls = (json.dumps({"name": name, "arguments": {"x": argument}}) for name in names)
    text = "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    assert tool_names(text) == tuple(names)


@pytest.mark.parametrize(
    "unit",
    [
        "[",
        '{"a":',
        "<tool_call>[",
        '<tool_call>{"a":"',
        '<tool_call>{\\"',
        "[TOOL_CALLS]",
        "[TOOL_CALLS]a",
        "<function=f>",
        "<function=",
        "[f(",
        "[f('\\",
        "```bash\n",
        "```bash\n'\\'\"\\\"",
        "   ",
        "a",
        "to=functions.",
        '{"name":"","arguments":{}};',
        "<|a|>",
    ],
)
@pytest.mark.parametrize("prefix", ["", "[f(", "[f('", "```bash\n", '```bash\n"'])
def test_repetition_ends(prefix: str, unit: str) -> None:
    # Bounded by the suite's timeout: a pattern that backtracks would take hours.
    text = prefix + unit * (200_000 // len(unit))
    assert len(tool_names(text)) <= MAX_NAMES
    assert len(tool_names(f"{text}\n```")) <= MAX_NAMES


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.mark.parametrize("parser", [None, "hermes", "qwen3_coder"])
def test_reads_tokens(tokenizer: Any, parser: str | None) -> None:
    read = ToolNames(tokenizer, parser)
    call = '<tool_call>\n{"name": "wetter_prüfen", "arguments": {}}\n</tool_call><|im_end|>'
    assert read(tokenizer.encode(call)) == ("wetter_prüfen",)
    assert read(tokenizer.encode("Nothing to do.<|im_end|>")) == ()
    assert read([]) == ()
    assert read.parser_failures == 0


def test_reads_marks_that_are_special_tokens(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    assert ToolNames(tokenizer, "mistral")(tokenizer.encode("[TOOL_CALLS]f{}<|im_end|>")) == ("f",)


def test_reads_the_last_tokens_only(tokenizer: Any) -> None:
    call = tokenizer.encode('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    filler = tokenizer.encode("x") * MAX_READ_TOKENS
    read = ToolNames(tokenizer, "hermes")
    assert read(call + filler) == ()
    assert read(filler + call) == ("f",)


def test_other_formats_are_left_to_vllms_parser(tokenizer: Any) -> None:
    read = ToolNames(tokenizer, "glm45")
    call = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
    assert tool_names(call) == ()
    assert read(tokenizer.encode(call)) == ("weather",)
    assert read(tokenizer.encode("```bash\nls\n```")) == ("ls",)
    assert read.parser_failures == 0


@pytest.mark.parametrize("parser", ["no such parser", "deepseek_v3", "cohere_command3"])
def test_a_parser_that_cannot_be_made_is_done_without(
    tokenizer: Any, parser: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="replicas.turns"):
        read = ToolNames(tokenizer, parser)
        assert read(tokenizer.encode('{"name": "f", "arguments": {}}')) == ("f",)
    assert read.parser_failures == 1
    assert parser in caplog.messages[-1]


def test_a_parser_that_raises_does_not_end_the_engine(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.tool_parsers import ToolParserManager

    read = ToolNames(tokenizer, "glm45")
    broken = ToolParserManager.get_tool_parser("glm45")

    def fail(*_: object) -> None:
        raise KeyError("made up")

    monkeypatch.setattr(broken, "extract_tool_calls", fail)
    tokens = tokenizer.encode('{"name": "f", "arguments": {}}')
    assert read(tokens) == read(tokens) == ("f",)
    assert read.parser_failures == 2


def test_a_tokenizer_that_raises_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Some raise at ids that the model has beyond their vocabulary."""

    class Limited:
        def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
            raise IndexError("made up")

    read = ToolNames(Limited(), None)
    with caplog.at_level(logging.WARNING, logger="replicas.turns"):
        assert read([200_000]) == read([200_000]) == ()
    assert read.parser_failures == 2
    assert len(caplog.messages) == 1
