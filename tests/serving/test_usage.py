"""The price of programs on a real cluster: the day's usage against the time in which the replicas computed."""

import csv
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cluster.cli import app
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster]

SETTLED_S = 1.0
"""Five times the period in which the replicas of the shared cluster write it."""
SHARE = 0.02
"""The sums of all programs differ by at most this share from the time in which the replicas computed."""


def usage(client: httpx.Client) -> dict[str, dict[str, str]]:
    """Today's rows of the default tenant, by program."""
    page = client.get("/admin/usage").raise_for_status()
    assert page.headers["content-type"].startswith("text/csv")
    return {row["program"]: row for row in csv.DictReader(page.text.splitlines()) if row["tenant"] == "default"}


def seconds(client: httpx.Client) -> tuple[float, float]:
    """The busy seconds of all replicas, and those of the programs of today."""
    replicas = client.get("/admin/statistics").raise_for_status().json()["replicas"]
    rows = usage(client).values()
    return sum(one["busy_s"] for one in replicas), sum(float(row["prefill_s"]) + float(row["decode_s"]) for row in rows)


def settled(client: httpx.Client) -> tuple[float, float]:
    """The same when they no longer change: replicas write the usage of turns after these have ended."""
    known = seconds(client)

    def same() -> bool:
        nonlocal known
        time.sleep(SETTLED_S)
        before, known = known, seconds(client)
        return before == known

    wait_until(same, "the usage still changes")
    return known


def program(client: httpx.Client, name: str, turns: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{name} " * 200}]
    for _ in range(turns):
        body = {"model": "tiny", "messages": messages, "max_tokens": 24, "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json=body, headers={"x-session-id": name}).raise_for_status()
        messages = [*messages, answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on. " * 40}]


def test_the_usage_of_programs_adds_up_to_the_busy_time(client: httpx.Client) -> None:
    if datetime.now(UTC).hour == 23 and datetime.now(UTC).minute >= 57:
        pytest.skip("the day ends during the test")
    before = settled(client)
    names = [f"usage-{i}" for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda name: program(client, name, 3), names))
    wait_until(
        lambda: sum(int(row["turns"]) for name, row in usage(client).items() if name in names) == 18,
        "not all turns have a price",
        poll_s=0.2,
    )
    busy_s, billed_s = (after - start for start, after in zip(before, settled(client), strict=True))
    assert busy_s > 0
    assert billed_s == pytest.approx(busy_s, rel=SHARE)
    rows = usage(client)
    assert all(int(rows[name]["output_tokens"]) == 72 for name in names)
    assert all(0 < int(rows[name]["cached_tokens"]) < int(rows[name]["prompt_tokens"]) for name in names)


def test_the_command_prints_the_page_and_the_servers_error(client: httpx.Client) -> None:
    run = CliRunner().invoke(app, ["programs", "usage", "--url", str(client.base_url)])
    assert (run.exit_code, run.stdout.splitlines()[0]) == (0, client.get("/admin/usage").text.splitlines()[0])
    refused = CliRunner().invoke(app, ["programs", "usage", "--day", "soon", "--url", str(client.base_url)])
    assert refused.exit_code == 1
    assert "day must be a date" in refused.output
