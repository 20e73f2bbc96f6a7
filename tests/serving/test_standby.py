"""The port of a local cluster while no ingress listens: each request gets 503, until an ingress has the port."""

import socket
import time
from pathlib import Path

import httpx
import pytest

from cluster.local.ports import free_ports
from cluster.local.standby import OVERDUE_S, RESTART_S, START_S, Standby, listeners

HOST = "127.0.0.1"
WITHIN_S = 20.0


@pytest.fixture
def free_port() -> int:
    return free_ports(1, HOST)[0]


def get(port: int, path: str = "/ready") -> httpx.Response:
    return httpx.get(f"http://{HOST}:{port}{path}", timeout=5.0)


def await_listeners(port: int, count: int) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while listeners(HOST, port) != count:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_it_answers_until_an_ingress_listens_and_after_it_has_died(free_port: int) -> None:
    with Standby(HOST, free_port):
        await_listeners(free_port, 1)
        begins = get(free_port)
        assert (begins.status_code, begins.json()["error"]["code"]) == (503, "starting")
        assert START_S - WITHIN_S <= int(begins.headers["retry-after"]) <= START_S
        posted = httpx.post(f"http://{HOST}:{free_port}/v1/messages", content=b"x" * 200_000)
        assert (posted.status_code, posted.json()["type"]) == (503, "error")
        with socket.create_server((HOST, free_port), reuse_port=True):
            time.sleep(0.5)
            await_listeners(free_port, 1)
        await_listeners(free_port, 1)
        died = get(free_port)
        assert died.status_code == 503
        assert OVERDUE_S <= int(died.headers["retry-after"]) <= RESTART_S
    with pytest.raises(httpx.ConnectError):
        get(free_port)


def test_a_restart_that_was_measured_is_expected_next_time(free_port: int) -> None:
    with Standby(HOST, free_port) as standby:
        for _ in range(2):
            await_listeners(free_port, 1)
            with socket.create_server((HOST, free_port), reuse_port=True):
                time.sleep(0.5)
                await_listeners(free_port, 1)
        await_listeners(free_port, 1)
        assert standby.retry_after_s == OVERDUE_S  # the restart took less


@pytest.mark.parametrize(
    ("host", "name", "rows", "found"),
    [
        (HOST, "tcp", ["0100007F:1F90 00000000:0000 0A", "00000000:1F90 00000000:0000 0A"], 1),
        (HOST, "tcp", ["0100007F:1F90 00000000:0000 0A", "0100007F:1F90 00000000:0000 0A"], 2),
        (HOST, "tcp", ["0100007F:0050 00000000:0000 0A", "0100007F:1F90 0100007F:0051 01"], 0),
        ("::1", "tcp6", [f"{'0' * 24}01000000:1F90 {'0' * 32}:0000 0A"], 1),
    ],
)
def test_listeners_are_found_in_the_kernels_table(
    tmp_path: Path, host: str, name: str, rows: list[str], found: int
) -> None:
    lines = [f"   {number}: {row} 00000000:00000000 00:00000000" for number, row in enumerate(rows)]
    (tmp_path / name).write_text("\n".join(["  sl  local_address rem_address   st", *lines]) + "\n")
    assert listeners(host, 8080, tmp_path) == found
