"""What the sources themselves promise: nothing of ours makes objects of bytes that somebody else may have written."""

import ast
from pathlib import Path
from typing import Any

from tests.sources import parsed

ROOT = Path(__file__).parents[2]
PACKAGES = ("cluster", "replicas", "router", "tools_runtime", "predictor_service", "helm", "deploy")
MODULES = frozenset({"pickle", "cloudpickle", "_pickle", "marshal", "shelve", "dill", "joblib"})
"""Whose loading runs what is loaded."""
CALLS = {
    "yaml": {"load", "load_all", "unsafe_load", "full_load"},
    "torch": {"load"},
    "numpy": {"load"},
    "np": {"load"},
    "builtins": {"eval", "exec"},
}
SAFE = {"cluster/config/loader.py": {"yaml.load"}, "tools_runtime/openapi.py": {"yaml.load"}}
"""With a loader that is a SafeLoader."""


def unsafe(path: Path) -> list[str]:
    tree = parsed(path)
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                found.append(module)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if name in CALLS.get(owner, ()):
                found.append(f"{owner}.{name}")
            case ast.Call(func=ast.Name(id=name)) if name in CALLS["builtins"]:
                found.append(name)
            case ast.Call(func=ast.Attribute(attr="pickled" | "unpickle" | "load_pickle" as name)):
                found.append(name)
    return [one for one in found if one not in SAFE.get(str(path.relative_to(ROOT)), ())]


def test_nothing_is_unpickled(tmp_path: Path, promised: Any) -> None:
    every = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(every) > 250
    found = {str(path.relative_to(ROOT)): one for path in every if (one := unsafe(path))}
    assert not found, found
    promised("bytes from the network or Redis", f"unpickled by {len(every)} sources", len(found), exactly=0)


def test_the_check_sees_what_it_is_to_see(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "import pickle\nfrom cloudpickle import loads\nimport yaml, torch\nyaml.load(x)\ntorch.load(y)\neval(z)\n"
    )
    monkeypatch.setitem(unsafe.__globals__, "ROOT", tmp_path)
    assert unsafe(file) == ["pickle", "cloudpickle", "yaml.load", "torch.load", "eval"]
