"""The documentation builds without a warning, and says what the program is."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from jsonschema import Draft7Validator
from ray.serve.schema import ServeDeploySchema
from typer.core import TyperGroup
from typer.testing import CliRunner

from benchmarks.readme import PAGE, render
from cluster.auth.middleware import OPEN_PATHS, role_of
from cluster.cli import app
from cluster.config.schema import CaesuraConfig
from cluster.http.ingress import ingress_class
from tests.docs.pages import DOCS, ROOT, Block, blocks, pages

COMMAND = re.compile(r"(?:^|`)caesura((?: [a-z_]+)*)([^|`\n>]*)", re.MULTILINE)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    every = [page.read_text() for page in tmp_path.rglob("*.html")]
    assert "<svg" in (tmp_path / "concepts.html").read_text()
    loaded = re.compile(r'<(?:script|img|link)[^>]+(?:src|href)="(?:https?:)?//')
    assert [found for page in every for found in loaded.findall(page)] == []


@pytest.mark.parametrize("subject", ["configuration", "metrics", "cli", "presets"])
def test_what_is_generated_is_current(subject: str) -> None:
    written = CliRunner().invoke(app, ["reference", subject], catch_exceptions=False).output
    assert (DOCS / "reference" / f"{subject}.md").read_text() == written, "run `make docs`"


def routes() -> set[tuple[str, str]]:
    handler = vars(ingress_class(CaesuraConfig()))["__init__"]
    app = next(cell.cell_contents for cell in handler.__closure__ if hasattr(cell.cell_contents, "routes"))
    own = (route for route in app.routes if not route.path.startswith(("/docs", "/openapi", "/redoc")))
    return {(method, route.path.replace(":path", "")) for route in own for method in route.methods - {"HEAD"}}


def test_every_route_is_in_the_table_with_its_role_and_has_an_example() -> None:
    text = (DOCS / "api.md").read_text()
    rows = dict(re.findall(r"^\| (`.*?) \| .* \| (\w+) \|$", text, re.MULTILINE))
    told = {
        (method, path, role)
        for names, role in rows.items()
        for methods, path in re.findall(r"`([A-Z, ]+) (/\S+)`", names)
        for method in methods.split(", ")
    }
    known = {(method, path, "none" if path in OPEN_PATHS else role_of(path).value) for method, path in routes()}
    assert told == known
    named = (DOCS / "api.md", DOCS / "rollouts.md")
    examples = "".join(block.text for page in named for block in blocks(page, "bash", "python"))
    for _, path in routes():
        shape = re.sub(r"\\{\w+\\}", r"[\\w$-]+", re.escape(path))
        assert re.search(rf"127\.0\.0\.1:8000{shape}\b", examples), path


def every_block(*languages: str) -> Iterator[Block]:
    for page in pages():
        yield from blocks(page, *languages)


@pytest.mark.parametrize("block", every_block("yaml"), ids=lambda block: f"{block.page}: {block.text[:30]!r}")
def test_configurations_are_valid(block: Block) -> None:
    values: dict[str, Any] = yaml.safe_load(block.text)
    if block.text.startswith("# values.yaml"):
        schema = json.loads((ROOT / "helm" / "caesura" / "values.schema.json").read_text())
        Draft7Validator(schema).validate(values)
        return
    if "applications" in values:
        ServeDeploySchema.model_validate(values)
        values = values["applications"][0]["args"]
    CaesuraConfig.model_validate(values)


def commands() -> Iterator[tuple[str, list[str], list[str]]]:
    """Page, words and options of every command that the pages show."""
    for page in pages():
        for words, rest in COMMAND.findall(page.read_text().replace("\\\n", " ")):
            if words.strip() or "--" in rest:
                yield page.name, words.split(), re.findall(r"--[a-z][\w-]*", rest)


def test_commands_and_options_are_there() -> None:
    root = typer.main.get_command(app)
    seen = 0
    for page, words, options in commands():
        here: Any = root
        for word in words:
            if not isinstance(here, TyperGroup):
                break
            assert word in here.commands, f"{page}: caesura {' '.join(words)}"
            here = here.commands[word]
        known = {name for parameter in here.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert set(options) <= known, f"{page}: caesura {' '.join(words)} {set(options) - known}"
        seen += 1
    assert seen > 20


def test_every_alert_is_in_the_operations_page() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
    alerts = {
        (rule["alert"], rule["labels"]["severity"])
        for group in rules["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    told = re.findall(
        r"^\| \[`(\w+)`\]\(runbooks\.md#\w+\) \| (\w+) \|", (DOCS / "operations.md").read_text(), re.MULTILINE
    )
    assert set(told) == alerts


def test_the_benchmarks_page_is_current() -> None:
    assert PAGE.read_text() == render(), "run `python -m benchmarks.readme`"
    assert len(PAGE.read_text().splitlines()) <= 200


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s:]+)\)", text)]
    assert targets and all((ROOT / target).exists() for target in targets)
