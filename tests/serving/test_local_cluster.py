"""How a cluster starts on a machine that is too busy for Ray."""

import socket
import subprocess
from typing import Any

import psutil
import pytest
import ray

from cluster.config.schema import CaesuraConfig
from cluster.local import cluster as local_cluster
from cluster.local.cluster import LocalCluster, StartFailed, ingresses

GAVE_UP = Exception("The current node timed out during startup. This could happen because ...")


class Rays:
    """In place of `ray.init`: the first ones give up. Each leaves a process, and a child of it without the mark."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.left: list[psutil.Process] = []
        self.living_at_start: list[int] = []

    def __call__(self, *_: Any, **__: Any) -> None:
        self.living_at_start.append(sum(one.is_running() and one.status() != "zombie" for one in self.left))
        parent = psutil.Process(subprocess.Popen(["sh", "-c", "env -i sleep 60; true"]).pid)
        while not (children := parent.children()) or children[0].name() != "sleep":
            pass  # it becomes what it is to be
        self.left += [parent, *children]
        if self.failures:
            raise self.failures.pop(0)
        raise StartFailed("far enough")


@pytest.mark.parametrize(
    ("failures", "starts", "told"),
    [
        ([GAVE_UP, GAVE_UP], 3, StartFailed),
        ([GAVE_UP, GAVE_UP, GAVE_UP], 3, Exception),
        ([ValueError("bad")], 1, ValueError),
    ],
)
def test_ray_is_started_again_without_what_it_left(
    monkeypatch: pytest.MonkeyPatch, failures: list[Exception], starts: int, told: type[Exception]
) -> None:
    rays = Rays(*failures)
    monkeypatch.setattr(ray, "init", rays)
    monkeypatch.setattr(local_cluster, "STOP_TIMEOUT_S", 1.0)
    config = CaesuraConfig.model_validate({"http": {"port": 0}, "redis": {"url": "redis://127.0.0.1:1"}})
    with pytest.raises(told):
        LocalCluster(config).start()
    assert rays.living_at_start == [0] * starts
    assert not any(one.is_running() and one.status() != "zombie" for one in rays.left)


def test_the_environment_is_restored_without_a_moment_in_which_it_is_empty() -> None:
    class Environment(dict[str, str]):
        def clear(self) -> None:
            raise AssertionError("other threads would see an empty environment")

        def __delitem__(self, name: str) -> None:
            assert name not in before, f"{name} would be missing for a moment"
            super().__delitem__(name)

    before = {"PATH": "/bin", "CHANGED": "old", "REMOVED": "1"}
    environment = Environment({"PATH": "/bin", "CHANGED": "new", "ADDED": "2"})
    local_cluster.restore_environment(environment, before)
    assert environment == before


def test_a_port_on_which_somebody_listens_is_not_shared() -> None:
    """Two ingresses share a port, so that two clusters could do it, too."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as listener:
        config = CaesuraConfig.model_validate({"http": {"port": listener.getsockname()[1]}})
        with pytest.raises(StartFailed, match=r"http\.port"):
            LocalCluster(config).start()


@pytest.mark.parametrize(
    ("http", "cores", "number"),
    [({}, 2, 1), ({}, 8, 2), ({"ingress_replicas": 1}, 64, 1), ({"ingress_replicas": 3}, 2, 3)],
)
def test_two_ingresses_serve_where_there_are_cores(http: dict[str, int], cores: int, number: int) -> None:
    assert ingresses(CaesuraConfig.model_validate({"http": http}), cores) == number
