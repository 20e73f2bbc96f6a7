"""What the chart gives to Ray Serve is deployed by `serve deploy`, answers, and follows the seats."""

import base64
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.local.embedded_redis import EmbeddedRedis
from cluster.local.ports import free_ports
from tests.deploy.chart import CHART, needs_helm, of_kind, serve_config, template
from tests.deploy.ray_head import ray_head
from tests.deploy.value_sets import SCALED

pytestmark = [needs_helm, pytest.mark.cluster, pytest.mark.timeout(900)]

WITHIN_S = 400.0
DEPLOYMENT = "ProgramServer:tiny"


def until(what: Callable[[], bool], told: Callable[[], str]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < end_s, told()
        time.sleep(0.5)


def at_home(config: dict[str, Any], redis_url: str, place: Path, secret: dict[str, Any], port: int) -> Path:
    """The rendered configuration, with what a pod has at fixed places where it is here."""
    args = config["applications"][0]["args"]
    password, address = redis_url.removeprefix("redis://:").split("@")
    (place / "password").write_text(password)
    (place / "keys.yaml").write_text(secret["stringData"]["keys.yaml"])
    args["redis"]["url"] = f"redis://{address}?password_file={place / 'password'}"
    args["auth"]["file"] = str(place / "keys.yaml")
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    path = place / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_the_cpu_preset_is_deployed_answers_and_is_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"config": {"replicas": {"count": 1, "cpus": 0.5, "kv_cache_bytes": 64 << 20, "cpu_offload_bytes": 0}}}
    rendered = template(small, SCALED, preset="cpu")
    keys = {
        role: base64.b64decode(key).decode()
        for role, key in of_kind(rendered, "Secret", "t-caesura-api-keys")["data"].items()
    }
    token = base64.b64decode(of_kind(rendered, "Secret", "t-caesura-ray")["data"]["auth_token"]).decode()
    (port,) = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", tmp_path / "ray.log"
    with EmbeddedRedis() as redis, ray_head(token, num_cpus=4, log=log) as (dashboard, environment):
        path = at_home(serve_config(rendered), redis.url, tmp_path, of_kind(rendered, "Secret", "t-caesura-keys"), port)

        assert httpx.get(f"{dashboard}/api/serve/applications/").status_code == 401
        command = ["serve", "deploy", str(path), "--address", dashboard]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        seat = runpy.run_path(str(CHART / "files" / "seat.py"))

        def application() -> dict[str, Any]:
            found = seat["call"](f"{dashboard}/api/serve/applications/")["applications"].get("caesura", {})
            assert found.get("status") != "DEPLOY_FAILED", found.get("message")
            return dict(found)

        until(lambda: application().get("status") == "RUNNING", lambda: str(application()))
        assert httpx.get(f"{url}/v1/models").status_code == 401
        asked = subprocess.run(
            [sys.executable, str(CHART / "files" / "ask.py"), url, "tiny"],
            env={**environment, "CAESURA_API_KEY": keys["serve"]},
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        assert asked.returncode == 0 and "tiny: 8 tokens" in asked.stdout, asked.stdout + asked.stderr
        for deployment in ("Ingress", DEPLOYMENT):
            options = application()["deployments"][deployment]["deployment_config"]
            assert options["graceful_shutdown_timeout_s"] > 1200

        assert seat["scale"](dashboard, DEPLOYMENT, 2) and not seat["scale"](dashboard, DEPLOYMENT, 2)

        def replicas() -> list[str]:
            return [one["state"] for one in application()["deployments"][DEPLOYMENT]["replicas"]]

        until(lambda: replicas() == ["RUNNING", "RUNNING"], lambda: str(replicas()))
        headers = {"Authorization": f"Bearer {keys['admin']}"}
        until(
            lambda: len(httpx.get(f"{url}/admin/statistics", headers=headers, timeout=30).json()["replicas"]) == 2,
            lambda: str(replicas()),
        )
        assert seat["scale"](dashboard, DEPLOYMENT, 1)
        until(lambda: replicas() == ["RUNNING"], lambda: str(replicas()))
