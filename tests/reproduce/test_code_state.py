"""The name of the code that decides a simulated run."""

from pathlib import Path

import pytest

from cluster.offline.reproduce import code_state as module
from cluster.offline.reproduce.code_state import code_state


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root that imports `replicas.steps` within a function and names `replicas.late` in a registry."""
    for name in module.PACKAGES:
        (tmp_path / name).mkdir()
    (folder := tmp_path / "cluster/offline/reproduce").mkdir(parents=True)
    (folder / "running.py").write_text(
        'POLICIES = {"late": "replicas.late:Late"}\n\ndef run():\n    from replicas.steps import step\n    step()\n'
    )
    for name in ("steps", "late", "unused"):
        (tmp_path / "replicas" / f"{name}.py").write_text("x = 1\n")
    monkeypatch.setattr(module, "files", lambda name: tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "path", ["cluster/offline/reproduce/running.py", "replicas/steps.py", "replicas/late.py", "replicas/measured.csv"]
)
def test_what_a_run_uses_counts(package: Path, path: str) -> None:
    before = code_state()
    with (package / path).open("a") as file:
        file.write("y = 2\n")
    assert code_state() != before


def test_other_modules_comments_docstrings_and_plans_do_not_count(package: Path) -> None:
    before = code_state()
    (package / "replicas" / "unused.py").write_text("x = 2\n")
    (package / "replicas" / "notes.md").write_text("a")
    (package / "replicas" / "steps.py").write_text('"""Steps."""\n\nx = 1  # one\n"""The first."""\n')
    (plans := package / "cluster/offline/reproduce/papers").mkdir()
    (plans / "lamps.yaml").write_text("a: 1\n")
    assert code_state() == before


def test_the_code_of_a_run_is_found_from_here() -> None:
    found = module._modules(module.ROOT)
    assert {"replicas.scheduler", "replicas.policies.mars", "cluster.offline.simulator.simulation"} <= found.keys()
    assert not any(name.startswith(("cluster.responses", "cluster.dispatch", "cluster.store")) for name in found)
