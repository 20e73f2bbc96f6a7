"""Fault: the replica of paused programs is killed. Their next turns load the contexts on the other replica."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.faults.promises import Promised
from tests.faults.stand import Stand, stand, until
from tests.faults.under_load import MODEL
from tests.serving.tool_site import ToolSite

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

FAULT = "replica of paused programs killed, with a disk tier"
PROMPT, OUTPUT, RETURNED, BLOCK = 3000, 20, 40, 32
WHOLE = (PROMPT + OUTPUT - 1) // BLOCK * BLOCK
"""Tokens of a context that tiers have: full chunks of the tokens with KV."""
PROGRAMS = 4
SECTIONS: dict[str, dict[str, Any]] = {
    "replicas": {"count": 2, "kv_cache_bytes": 64 << 20, "cpu_offload_bytes": 128 << 20},
}


def prompt_of(number: int) -> list[int]:
    return [100 + (number * 31 + place * 7) % 900 for place in range(PROMPT)]


def turn(url: str, program: str, prompt: list[int]) -> list[int]:
    """Run a turn of a program that is expected back in a minute. Return what it generates."""
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0.0,
        "return_token_ids": True, "agentic_context": {"expected_resume": 60, "expected_later_turns": 3},
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-session-id": program}, timeout=120.0)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def turns_of(url: str, program: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = httpx.get(f"{url}/v1/programs/{program}", timeout=30.0).json()["turns"]
    return turns


def written(cluster: Stand) -> dict[int, int]:
    """Contexts that each replica has written, by the pid of its actor."""
    return {one["pid"]: one["disk_writes"]["written"] for one in cluster.replicas()}


def test_programs_resume_from_disk_after_their_replica_is_killed(
    site: ToolSite, is_long: bool, promised: Promised, tmp_path: Path
) -> None:
    """The programs pause on both replicas. That with more of them is killed with SIGKILL, engine and all. Each next
    turn generates what it generates where nothing is cached anywhere.
    """
    if not is_long:
        pytest.skip("with --long: tests/contracts/test_disk_tier.py has the short form, without a cluster")
    volume = tmp_path / "kv"
    tier = {"disk_tier": {"path": str(volume), "bytes": 1 << 30}}
    with stand(tmp_path, site, replicas=SECTIONS["replicas"] | tier) as cluster:
        cluster.await_whole()
        contexts = {f"p{n}": prompt_of(n) + turn(cluster.url, f"p{n}", prompt_of(n)) for n in range(PROGRAMS)}
        until(lambda: sum(written(cluster).values()) >= PROGRAMS, "the contexts are not written")
        pid, of_victim = max(written(cluster).items(), key=lambda one: one[1])
        victim = psutil.Process(pid)
        engines = victim.children(recursive=True)
        for process in (victim, *engines):
            process.kill()
        began_s = time.monotonic()
        after = {name: turn(cluster.url, name, context + [3] * RETURNED) for name, context in contexts.items()}
        resumed_s = time.monotonic() - began_s
        loaded = {name: turns_of(cluster.url, name)[-1]["disk_tokens"] for name in contexts}
        from_disk = [name for name, tokens in loaded.items() if tokens >= WHOLE]

        cluster.await_whole()
        for folder in volume.iterdir():
            shutil.rmtree(folder)
        until(lambda: httpx.post(f"{cluster.url}/admin/reset", timeout=30.0).is_success, "the caches are not empty")
        computed = {}
        for name, context in contexts.items():
            computed[name] = turn(cluster.url, f"again-{name}", context + [3] * RETURNED)
            assert turns_of(cluster.url, f"again-{name}")[-1]["disk_tokens"] == 0, json.dumps(loaded)
    wrong = sum(after[name] != computed[name] for name in contexts)
    promised(FAULT, "turns with other tokens than computed", wrong, exactly=0)
    promised(FAULT, "programs that loaded their context", len(from_disk), unit=f"of {of_victim}", at_least=of_victim)
    promised(FAULT, "all next turns after the kill, one after the other", resumed_s, unit="s", at_most=30)
