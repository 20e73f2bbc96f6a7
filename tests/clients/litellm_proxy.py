"""LiteLLM's proxy as a process, and loops of tool calls through each of its routes."""

import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from cluster.local.ports import free_ports
from tests.clients.installed import environment

STARTS_WITHIN_S = 120
STOPS_WITHIN_S = 30
RESULT = "a.txt"
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "ls", "description": "List a folder.", "parameters": PARAMETERS}
MOST_TURNS = 8


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that answers."""

    url: str
    key: str

    def openai(self, session: str) -> openai.OpenAI:
        headers = {"x-session-id": session}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, default_headers=headers, max_retries=0)

    def anthropic(self, session: str) -> anthropic.Anthropic:
        headers = {"x-session-id": session}
        return anthropic.Anthropic(base_url=self.url, api_key=self.key, default_headers=headers, max_retries=0)


@contextmanager
def started(command: Path, config: str, home: Path) -> Iterator[Proxy]:
    """Start the proxy with the text of this configuration, on loopback."""
    (home / "litellm.yaml").write_text(config)
    (port,) = free_ports(1, "127.0.0.1")
    proxy = Proxy(f"http://127.0.0.1:{port}", f"sk-{secrets.token_hex(16)}")
    # Without the second variable it fetches a table of prices.
    ours = {"LITELLM_MASTER_KEY": proxy.key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    log = home / "litellm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [command, "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)],
            cwd=home,
            env={**environment(home), **ours},
            stdout=output,
            stderr=output,
        )
        try:
            _wait(process, proxy, log)
            yield proxy
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOPS_WITHIN_S)
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", proxy: Proxy, log: Path) -> None:
    give_up_s = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < give_up_s and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{proxy.url}/health/liveliness").is_success:
                return
        time.sleep(0.2)
    raise AssertionError(f"LiteLLM did not start:\n{log.read_text(errors='replace')}")


def asked_by(session: str) -> str:
    """The first message of a session. Equal conversations would find each other's blocks in the prefix cache."""
    return f"List the files of {session}."


def chat(proxy: Proxy, session: str) -> tuple[int, str]:
    """Return the number of calls and the final text of a loop on `/v1/chat/completions`."""
    client, calls = proxy.openai(session), 0
    messages: list[Any] = [{"role": "user", "content": asked_by(session)}]
    tools: list[Any] = [{"type": "function", "function": FUNCTION}]
    for _ in range(MOST_TURNS):
        message = client.chat.completions.create(model="tiny", messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return calls, message.content or ""
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
            calls += 1
    raise AssertionError(messages)


def _responses(proxy: Proxy, session: str, *, stream: bool) -> tuple[int, str]:
    client, calls = proxy.openai(session), 0
    items: list[Any] = [{"role": "user", "content": asked_by(session)}]
    tools: list[Any] = [{"type": "function", **FUNCTION}]
    for _ in range(MOST_TURNS):
        answer: Any = client.responses.create(model="tiny", input=items, tools=tools, stream=stream)
        if stream:
            events = list(answer)
            assert events[-1].type == "response.completed", events
            answer = events[-1].response
        asked = [item for item in answer.output if item.type == "function_call"]
        if not asked:
            return calls, answer.output_text
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in asked]
        calls += len(asked)
    raise AssertionError(items)


def responses(proxy: Proxy, session: str) -> tuple[int, str]:
    """The same on `/v1/responses`."""
    return _responses(proxy, session, stream=False)


def streamed_responses(proxy: Proxy, session: str) -> tuple[int, str]:
    """The same on `/v1/responses` with streams."""
    return _responses(proxy, session, stream=True)


def messages(proxy: Proxy, session: str) -> tuple[int, str]:
    """The same on `/v1/messages`."""
    client, calls = proxy.anthropic(session), 0
    said: list[Any] = [{"role": "user", "content": asked_by(session)}]
    tools: list[Any] = [{"name": "ls", "description": "List a folder.", "input_schema": PARAMETERS}]
    for _ in range(MOST_TURNS):
        answer = client.messages.create(model="tiny-messages", max_tokens=1000, messages=said, tools=tools)
        said.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
        asked = [block for block in answer.content if block.type == "tool_use"]
        if not asked:
            return calls, "".join(block.text for block in answer.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": RESULT} for block in asked]
        said.append({"role": "user", "content": results})
        calls += len(asked)
    raise AssertionError(said)


WAYS: Mapping[str, Callable[[Proxy, str], tuple[int, str]]] = {
    "chat": chat,
    "Responses": responses,
    "Responses, streamed": streamed_responses,
    "Messages": messages,
}
"""Loops through the proxy, by the name of their row."""
