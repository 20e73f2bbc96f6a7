"""Our kind of tool for MCP servers, in the client scenarios of MCP's conformance harness.

`make clients` installs the harness in `.cache/clients`, and shows the table that is written to
`out/mcp_conformance.md`. The scenarios of authorization are left out: our client sends the headers of its
configuration, and no OAuth flow.
"""

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.installed import COMMANDS, run, write_table
from tests.docs.pages import ROOT

HARNESS = COMMANDS.parent / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
CLIENT = ROOT / "tests" / "clients" / "mcp_conformance_client.py"

HANDSHAKE, LAST_HANDSHAKE, STATELESS = "2025-06-18", "2025-11-25", "2026-07-28"
SCENARIOS: dict[str, tuple[str, ...]] = {
    "initialize": (HANDSHAKE, LAST_HANDSHAKE),
    "tools_call": (HANDSHAKE, LAST_HANDSHAKE, STATELESS),
    "elicitation-sep1034-client-defaults": (LAST_HANDSHAKE,),
    "sse-retry": (LAST_HANDSHAKE,),
    "request-metadata": (STATELESS,),
    "sep-2322-client-request-state": (STATELESS,),
    "http-standard-headers": (STATELESS,),
    "http-custom-headers": (STATELESS,),
    "http-invalid-tool-headers": (STATELESS,),
    "json-schema-ref-no-deref": (STATELESS,),
    "json-schema-2020-12-preservation": (LAST_HANDSHAKE, STATELESS),
    "sep-2640-client-no-prefetch": ("extension",),
    "sep-2640-client-verify-digest": ("extension",),
    "sep-2640-client-verify-size": ("extension",),
    "sep-2640-client-verify-frontmatter": ("extension",),
}
"""All client scenarios but those of authorization, and the protocol versions that each is for."""

FAILS = {"elicitation-sep1034-client-defaults": "a user has to be asked, and the cluster's tools have none"}
"""Scenarios that fail, with the reason."""
SKIPPED = {name: "our client does not use the extension" for name in SCENARIOS if name.startswith("sep-2640-")}
"""Scenarios without a check that applies, with the reason."""

RUNS = [(name, version) for name, versions in SCENARIOS.items() for version in versions]


@pytest.fixture(scope="module")
def rows() -> Iterator[list[list[str]]]:
    """The table's rows, which are written at the end."""
    found: list[list[str]] = []
    yield found
    write_table("mcp_conformance.md", ["client scenario of MCP", "protocol", "checks passed", "result"], found)


def harness(home: Path, *arguments: str) -> str:
    if not HARNESS.exists():
        pytest.skip("the harness is not installed: make clients")
    done = run([str(COMMANDS / "node"), str(HARNESS), *arguments], home)
    return done.stdout + done.stderr


def test_no_scenario_is_forgotten(tmp_path: Path) -> None:
    listed = dict(re.findall(r"^  - (\S+) \[(.+)\]$", harness(tmp_path, "list", "--client"), re.MULTILINE))
    ours = {name: tuple(versions.split(",")) for name, versions in listed.items() if not name.startswith("auth/")}
    assert ours == SCENARIOS


@pytest.mark.parametrize(("scenario", "version"), RUNS, ids=[f"{name}, {version}" for name, version in RUNS])
def test_scenarios(scenario: str, version: str, rows: list[list[str]], tmp_path: Path) -> None:
    client = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, str(CLIENT)])
    chosen = ["--scenario", scenario, *(["--spec-version", version] if version != "extension" else [])]
    printed = harness(tmp_path, "client", "--command", client, *chosen, "--output-dir", str(tmp_path))
    checks = [check for file in tmp_path.rglob("checks.json") for check in json.loads(file.read_text())]
    counts = Counter(check["status"] for check in checks)
    judged = counts["SUCCESS"] + counts["FAILURE"] + counts["WARNING"]
    right = counts["FAILURE"] == 0 and not re.search("CLIENT (TIMED OUT|EXITED WITH ERROR)", printed)
    reason = FAILS.get(scenario) or SKIPPED.get(scenario)
    verdict = "fail" if not right else "pass" if judged else "skipped"
    result = verdict if reason is None else f"{verdict}: {reason}"
    rows.append([scenario, version, f"{counts['SUCCESS']} of {judged}", result])
    expected = "fail" if scenario in FAILS else "skipped" if scenario in SKIPPED else "pass"
    assert verdict == expected, printed
