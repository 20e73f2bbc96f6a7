"""One tenant before what another has: nothing is read or cancelled, and no answer is faster for it."""

import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.faults.outsiders.guarded import Guarded

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WAIT_S = 30.0
PREFIX_TOKENS = 3000
WORDS = ("river", "stone", "cloud", "lamp", "seven", "green", "walks", "under", "after", "bridge")


def made(client: httpx.Client, number: int, **said: Any) -> dict[str, Any]:
    body = {"model": "tiny", "input": f"Count to {number}.", "max_output_tokens": 4, **said}
    answer = client.post(RESPONSES, json=body, headers={"x-session-id": f"theirs-{number}"})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert isinstance(told, dict)
    return told


def await_phase(client: httpx.Client, path: str, phases: set[str]) -> str:
    give_up = time.monotonic() + WAIT_S
    while (status := str(client.get(path).json()["status"])) not in phases:
        assert time.monotonic() < give_up, status
        time.sleep(0.05)
    return status


def test_nothing_of_another_is_read_or_cancelled(acme: httpx.Client, other: httpx.Client, promised: Any) -> None:
    done = [made(acme, number)["id"] for number in range(3)]
    long_run = {"background": True, "max_output_tokens": 3000, "ignore_eos": True}
    running = [made(acme, number, **long_run)["id"] for number in range(3, 5)]
    programs = [f"theirs-{number}" for number in range(5)]
    names = {*done, *running, *programs}
    read: list[str] = []

    def tried(method: str, path: str, **said: Any) -> None:
        answer = other.request(method, path, **said)
        if answer.status_code not in (400, 404, 405, 422) and any(name in answer.text for name in names):
            read.append(f"{method} {path}: {answer.text[:200]}")

    for name in (*done, *running):
        path = f"{RESPONSES}/{name}"
        for where in (path, f"{path}?stream=true", f"{path}?starting_after=0&stream=true", f"{path}/input_items"):
            tried("GET", where)
        for method, where in (("POST", f"{path}/cancel"), ("DELETE", path)):
            tried(method, where)
        tried("POST", RESPONSES, json={"model": "tiny", "input": "and?", "previous_response_id": name})
    for name in programs:
        for spelt in (name, f"acme/{name}", f"acme%2F{name}", f"../acme/{name}", f"..%2Facme%2F{name}"):
            tried("GET", f"/v1/programs/{spelt}?include=token_ids")
            tried("POST", f"/v1/programs/{spelt}/cancel")
    tried("GET", "/v1/programs?limit=1000")
    phases = {acme.get(f"{RESPONSES}/{name}").json()["status"] for name in running}
    cancelled = len(phases - {"queued", "in_progress", "completed", "incomplete"})
    lost = [name for name in done if acme.get(f"{RESPONSES}/{name}").status_code != 200]
    for name in running:
        acme.post(f"{RESPONSES}/{name}/cancel")
        await_phase(acme, f"{RESPONSES}/{name}", {"cancelled", "completed", "incomplete"})
    assert not read and not lost, (read, lost)
    promised("a tenant asks for another's", "cross reads", len(read), exactly=0)
    promised("a tenant asks for another's", "cross cancels and deletes", cancelled + len(lost), exactly=0)


def area(first: list[float], second: list[float]) -> float:
    """Under the ROC curve of the best threshold classifier that tells them apart by this one number: 0.5 is a guess."""
    wins = sum((one < two) + 0.5 * (one == two) for one in first for two in second) / (len(first) * len(second))
    return max(wins, 1 - wins)


def probe(client: httpx.Client, prompt: str) -> tuple[float, int, int]:
    """Seconds to the answer's first token, how many tokens the prompt has, and how many of them were cached."""
    began = time.perf_counter()
    answer = client.post(COMPLETIONS, json={"model": "tiny", "prompt": prompt, "max_tokens": 1})
    took_s = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return took_s, int(usage["prompt_tokens"]), int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def prompts(seed: int) -> Callable[[], str]:
    rng = random.Random(seed)
    return lambda: " ".join(rng.choice(WORDS) for _ in range(PREFIX_TOKENS // 3))


def reordered(prompt: str, rng: random.Random) -> str:
    """Another prompt of as many tokens: the same words, the first, which has no space before it, in its place."""
    first, *others = prompt.split()
    return " ".join([first, *rng.sample(others, len(others))])


def test_no_classifier_tells_what_another_has_cached(
    guarded: Guarded, acme: httpx.Client, other: httpx.Client, is_long: bool, promised: Any
) -> None:
    each = 600 if is_long else 40
    new, rng = prompts(each), random.Random(1)
    times: dict[str, list[float]] = {"theirs": [], "nobody's": [], "own": []}
    hits = 0
    order = ["theirs", "nobody's"] * each + ["own"] * (each // 4)
    rng.shuffle(order)
    for kind in order:
        prompt = new()
        # Each probe comes after one request for a prompt of that length, since an engine on CPU has kernels of lengths
        # that it has just seen: what differs is only which prompt, and whose.
        before = {"theirs": acme, "nobody's": acme, "own": other}[kind]
        _, length, _ = probe(before, prompt if kind != "nobody's" else reordered(prompt, rng))
        took_s, tokens, cached = probe(other, prompt)
        assert tokens == length
        times[kind].append(took_s)
        hits += cached if kind != "own" else 0
        assert kind != "own" or cached > PREFIX_TOKENS // 4, "a tenant's own prefix is cached: the probe can see hits"
    fault = "a tenant probes another's prefix cache"
    promised(fault, f"cached tokens told, {2 * each} probes", hits, exactly=0)
    promised(fault, "AUC by time", area(times["theirs"], times["nobody's"]), unit="x", at_most=0.55)
    # Where this is no more than a guess, the one above says nothing.
    promised(fault, "AUC by time of its own prefix", area(times["own"], times["nobody's"]), unit="x", at_least=0.8)
