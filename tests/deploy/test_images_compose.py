"""docker compose for one machine: its files, and the secrets that its script makes, used by the real programs."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from jsonschema import Draft7Validator

from cluster.auth.keys import Role, read_keys, utc_now
from cluster.config.loader import load_config
from cluster.local.embedded_redis import _redis_server

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
SCHEMA = Path(__file__).parent / "schemas" / "compose-spec.json"
ATTEMPTS = 200
PAUSE_S = 0.05


def read(name: str) -> Any:
    return yaml.safe_load((COMPOSE / name).read_text())


SERVICES: dict[str, dict[str, Any]] = read("compose.yaml")["services"]


def secrets_in(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMPOSE / "secrets.sh", folder], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compose") / "secrets"
    made = secrets_in(folder)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("name", ["compose.yaml", "gpu.yaml"])
def test_it_is_a_compose_file(name: str) -> None:
    validator = Draft7Validator(json.loads(SCHEMA.read_text()))
    assert [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(read(name))] == []


def test_the_schema_refuses_what_is_misspelt() -> None:
    wrong = read("compose.yaml")
    wrong["services"]["redis"]["healthchek"] = wrong["services"]["redis"].pop("healthcheck")
    assert list(Draft7Validator(json.loads(SCHEMA.read_text())).iter_errors(wrong))


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_gain_nothing_and_is_reached_from_this_machine_only(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service and "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_only_caesura_reaches_the_store_and_nobody_the_world_through_it() -> None:
    assert {name for name, service in SERVICES.items() if "store" in service["networks"]} == {"caesura", "redis"}
    networks = read("compose.yaml")["networks"]
    assert networks["store"]["internal"] and networks["metrics"]["internal"]
    assert {name for name, service in SERVICES.items() if "door" in service["networks"]} == {"caesura", "grafana"}


def test_the_foreign_images_are_those_of_the_lock() -> None:
    assert (COMPOSE / ".env").resolve() == (ROOT / "deploy" / "docker" / "digests.env").resolve()
    locked = dict(re.findall(r"^([A-Z_]+)=(.+)$", (COMPOSE / ".env").read_text(), re.MULTILINE))
    for name in SERVICES.keys() - {"caesura"}:
        variable = re.match(r"\$\{([A-Z_]+):\?", SERVICES[name]["image"])
        assert variable is not None, SERVICES[name]["image"]
        assert "@sha256:" in locked[variable[1]]


def test_every_file_that_it_names_is_there_or_made_by_the_script(secrets: Path) -> None:
    whole = read("compose.yaml")
    files = [entry["file"] for kind in ("secrets", "configs") for entry in whole[kind].values()]
    files += [
        volume.split(":")[0] for one in SERVICES.values() for volume in one.get("volumes", ()) if volume.startswith(".")
    ]
    for name in (re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", file) for file in files):
        made = name.removeprefix("./secrets/")
        assert (secrets / made if made != name else COMPOSE / name).exists(), name


def test_secrets_are_made_once_and_each_is_another(secrets: Path, tmp_path: Path) -> None:
    assert secrets_in(secrets).returncode == 1
    assert secrets.stat().st_mode & 0o777 == 0o700
    assert (secrets / "api_key").stat().st_mode & 0o777 == 0o600
    secrets_in(tmp_path / "others")
    for path in secrets.rglob("*"):
        if path.is_file():
            assert path.read_text() != (tmp_path / "others" / path.relative_to(secrets)).read_text(), path


def test_the_keys_open_what_they_should_and_are_kept_as_digests(secrets: Path) -> None:
    ring = read_keys(secrets / "keys" / "keys.yaml")
    roles = {}
    for name in ("api_key", "metrics_key", "admin_key"):
        key = (secrets / name).read_text()
        assert key not in (secrets / "keys" / "keys.yaml").read_text()
        caller = ring.find(key, utc_now())
        assert caller is not None
        roles[name] = caller.roles
    assert roles == {"api_key": {Role.SERVE}, "metrics_key": {Role.METRICS}, "admin_key": {Role.ADMIN}}


def test_the_configuration_is_one_and_closes_the_door() -> None:
    config = load_config(COMPOSE / "caesura.yaml", {})
    folder, _, file = str(config.auth.file).rpartition("/")
    assert f"./secrets/{folder.removeprefix('/run/')}:{folder}:ro" in SERVICES["caesura"]["volumes"]
    assert file == "keys.yaml"
    over = load_config(COMPOSE / "caesura.yaml", read("gpu.yaml")["services"]["caesura"]["environment"])
    assert over.replicas.accelerator == "gpu"


@contextmanager
def redis_with(settings: Path, socket: Path) -> Iterator[None]:
    _, _, *arguments = SERVICES["redis"]["command"]
    command = [
        _redis_server(),
        str(settings),
        *arguments,
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--dir",
        str(socket.parent),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(ATTEMPTS):
            if socket.exists():
                break
            time.sleep(PAUSE_S)
        yield
    finally:
        server.terminate()
        server.wait()


def test_redis_takes_its_settings_and_lets_in_only_who_knows_the_password(secrets: Path, tmp_path: Path) -> None:
    url = SERVICES["caesura"]["environment"]["CAESURA__REDIS__URL"]
    assert url == "redis://redis:6379/0?password_file=/run/secrets/redis_password"
    password = (secrets / "redis_password").read_text()
    assert re.fullmatch(r"[0-9a-f]{64}", password)
    with redis_with(secrets / "redis.conf", tmp_path / "socket"):
        with (
            redis.Redis(unix_socket_path=str(tmp_path / "socket")) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        with redis.Redis(unix_socket_path=str(tmp_path / "socket"), password=password, decode_responses=True) as ours:
            assert ours.ping()
            assert ours.config_get("appendonly") == {"appendonly": "yes"}
            assert ours.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            # Without a limit, Caesura cannot see that Redis is nearly full.
            assert int(ours.config_get("maxmemory")["maxmemory"]) == (1 << 30) * 65 // 100 >> 20 << 20
    assert SERVICES["redis"]["mem_limit"] == "1gb"


def test_prometheus_asks_as_the_committed_configuration_but_here_and_with_its_key() -> None:
    ours = read("prometheus.yml")
    (job,) = ours["scrape_configs"]
    assert job.pop("authorization") == {"credentials_file": "/run/secrets/metrics_key"}
    assert job["static_configs"] == [{"targets": ["caesura:8000"]}]
    committed = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus-ingress.yml").read_text())
    job["static_configs"] = committed["scrape_configs"][0]["static_configs"]
    assert ours == committed, "write deploy/compose/prometheus.yml anew from prometheus-ingress.yml"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    key = tmp_path / "metrics_key"
    key.write_text("csk-" + "0" * 64)
    text = (COMPOSE / "prometheus.yml").read_text().replace("/run/secrets/metrics_key", str(key))
    (tmp_path / "prometheus.yml").write_text(text)
    shutil.copy(ROOT / "deploy" / "prometheus" / "rules.yml", tmp_path)
    told = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    (source,) = read("grafana/datasources/caesura.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = read("grafana/dashboards/caesura.yaml")["providers"]
    mounted = dict(volume.split(":")[1::-1] for volume in SERVICES["grafana"]["volumes"])
    dashboards = COMPOSE / mounted[provider["options"]["path"]]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (dashboards / Path(home).name).exists()
    assert Path(home).parent == Path(provider["options"]["path"])
    assert (COMPOSE / mounted["/etc/grafana/provisioning"]).is_dir()
