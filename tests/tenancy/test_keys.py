"""API keys: files of them, and whose a key is."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.auth.keys import Caller, KeyFile, Role, digest_of, keys_of, new_key, read_keys
from cluster.core.errors import ConfigError

NOW = datetime(2030, 1, 1, tzinfo=UTC)
PLAIN = "a-plain-key-of-twenty-six"


def entry(key: str, tenant: str = "acme", **more: Any) -> dict[str, Any]:
    return {"tenant": tenant, "sha256": digest_of(key), **more}


def test_new_keys_are_long_and_never_the_same() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("csk-") and len(key) > 40 for key in keys)


def test_a_key_is_found_by_its_digest_or_in_plain() -> None:
    ring = keys_of({"keys": [entry("one" * 8, name="ci"), {"tenant": "other", "key": PLAIN}]}, "keys.yaml")
    assert ring.find("one" * 8, NOW) == Caller("acme", frozenset({Role.SERVE}), "ci")
    assert ring.find(PLAIN, NOW) == Caller("other", frozenset({Role.SERVE}), "")
    for wrong in ("", "one" * 7, PLAIN + "x", PLAIN[:-1], digest_of("one" * 8), "\udcff", "é" * 20):
        assert ring.find(wrong, NOW) is None


def test_a_key_opens_nothing_from_its_end_on() -> None:
    ring = keys_of({"keys": [entry(PLAIN, expires="2030-01-01T00:00:00Z")]}, "keys.yaml")
    assert ring.find(PLAIN, NOW - timedelta(seconds=1)) is not None
    assert ring.find(PLAIN, NOW) is None


def test_an_administrator_may_do_everything_and_others_what_they_were_given() -> None:
    ring = keys_of({"keys": [entry("a" * 20, roles=["admin"]), entry("m" * 20, roles=["metrics"])]}, "keys.yaml")
    admin, metrics = ring.find("a" * 20, NOW), ring.find("m" * 20, NOW)
    assert admin is not None and all(admin.may(role) for role in Role)
    assert metrics is not None and [role for role in Role if metrics.may(role)] == [Role.METRICS]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "must be a mapping"),
        ([], "must be a mapping"),
        ({}, "keys: Field required"),
        ({"keys": []}, "keys: Tuple should have at least 1 item"),
        ({"keys": [{"sha256": "0" * 64}]}, "keys.0.tenant: Field required"),
        ({"keys": [entry(PLAIN, tenant="a/b")]}, "keys.0.tenant: String should match pattern"),
        ({"keys": [{"tenant": "a"}]}, "keys.0: Value error, give `sha256` or `key`"),
        ({"keys": [entry(PLAIN) | {"key": PLAIN}]}, "keys.0: Value error, give `sha256` or `key`"),
        ({"keys": [{"tenant": "a", "key": "short"}]}, "keys.0.key: String should have at least 20"),
        ({"keys": [{"tenant": "a", "key": PLAIN + "\n"}]}, "keys.0.key: String should match pattern"),
        ({"keys": [{"tenant": "a", "sha256": "00"}]}, "keys.0.sha256: String should match pattern"),
        ({"keys": [entry(PLAIN, roles=["root"])]}, "keys.0.roles.0: Input should be"),
        ({"keys": [entry(PLAIN, roles=[])]}, "keys.0.roles: "),
        ({"keys": [entry(PLAIN, expires="2030-01-01T00:00:00")]}, "keys.0.expires: "),
        ({"keys": [entry(PLAIN, colour="red")]}, "keys.0.colour: Extra inputs are not permitted"),
        ({"keys": [entry(PLAIN, name="x"), entry(PLAIN, tenant="b", name="y")]}, "'y' of 'b' is there twice"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_by_field_and_without_a_key(content: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        keys_of(content, "keys.yaml")
    assert str(error.value).startswith("keys.yaml: ") and said in str(error.value)
    assert PLAIN not in str(error.value) and digest_of(PLAIN) not in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.yaml: cannot be read"):
        read_keys(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text(f"keys: [{PLAIN}: {{")
    with pytest.raises(ConfigError, match=r"broken.yaml: not valid YAML") as error:
        read_keys(broken)
    assert PLAIN not in str(error.value)


def write(path: Path, *keys: str) -> None:
    path.write_text(yaml.safe_dump({"keys": [entry(key) for key in keys]}))


def opened(path: Path) -> KeyFile:
    file = KeyFile(path)
    file.open()
    return file


def test_a_file_that_is_not_open_lets_nobody_in(tmp_path: Path) -> None:
    write(tmp_path / "keys.yaml", "a" * 20)
    assert KeyFile(tmp_path / "keys.yaml").find("a" * 20) is None


class TestTheFileChanges:
    def test_keys_come_and_go(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.yaml"
        write(path, "a" * 20)
        file = opened(path)
        assert file.find("a" * 20) is not None and not file.refresh()
        write(path, "b" * 20, "c" * 20)
        assert file.refresh()
        assert file.find("a" * 20) is None and file.find("b" * 20) is not None

    def test_behind_a_link_as_kubernetes_does_it(self, tmp_path: Path) -> None:
        for name, key in (("one", "a" * 20), ("two", "b" * 20)):
            (tmp_path / name).mkdir()
            write(tmp_path / name / "keys.yaml", key)
        link = tmp_path / "data"
        link.symlink_to(tmp_path / "one")
        file = opened(link / "keys.yaml")
        link.unlink()
        link.symlink_to(tmp_path / "two")
        assert file.refresh() and file.find("b" * 20) is not None

    @pytest.mark.parametrize("content", ["", "keys: []", "keys: [{", None], ids=["empty", "none", "broken", "gone"])
    def test_what_cannot_be_read_changes_nothing(self, tmp_path: Path, content: str | None) -> None:
        path = tmp_path / "keys.yaml"
        write(path, "a" * 20)
        file = opened(path)
        path.unlink()
        if content is not None:
            path.write_text(content)
        assert not file.refresh() and file.failures == 1
        assert file.find("a" * 20) is not None
        assert not file.refresh() and file.failures == 1  # told once
        write(path, "b" * 20)
        assert file.refresh() and file.find("a" * 20) is None
