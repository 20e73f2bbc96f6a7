"""Who can reach the processes of a local cluster: nobody from outside of the machine, and nobody without the token."""

import json
import os
import subprocess
import sys
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import grpc
import pytest

from cluster.local.cluster import make_token_private

METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.JobInfoGcsService/AddJob",
    "/ray.rpc.ActorInfoGcsService/KillActorViaGcs",
)
"""Reading and running: methods of Ray's GCS. Ray's own client would try again for minutes."""


def refusal(address: str, method: str, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode | None:
    """Call a method with an empty message. Return the status of its error; None: it was served."""
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=20, metadata=metadata)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return None


def is_local(address: str) -> bool:
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def test_ray_listens_on_loopback_and_refuses_who_has_no_token(tmp_path: Path) -> None:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ours |= {"PYTHONPATH": str(Path.cwd()), "HOME": str(tmp_path)}
    script = Path(__file__).with_name("ray_on_loopback.py")
    with subprocess.Popen([sys.executable, script], env=ours, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cluster:
        assert cluster.stdin is not None and cluster.stdout is not None
        try:
            started = json.loads(cluster.stdout.readline())
            names = {name for name, _ in started["listening"]}
            assert {"gcs_server", "raylet"} <= names and len(started["listening"]) >= 8
            assert [one for one in started["listening"] if not is_local(one[1])] == []
            assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                refusals = {method: refusal(started["address"], method, metadata) for method in METHODS}
                assert set(refusals.values()) == {grpc.StatusCode.UNAUTHENTICATED}, refusals
            token = (tmp_path / ".ray" / "auth_token").read_text()
            ours_too = (("authorization", f"Bearer {token}"),)
            assert refusal(started["address"], METHODS[0], ours_too) is None
        finally:
            cluster.stdin.close()
            cluster.wait(60)


@pytest.mark.parametrize("mode", [None, 0o644, 0o600])
def test_rays_token_is_for_this_user_only(tmp_path: Path, mode: int | None) -> None:
    path = tmp_path / ".ray" / "auth_token"
    if mode is not None:
        path.parent.mkdir()
        path.write_text("of another cluster")
        path.chmod(mode)
    make_token_private(path)
    first = path.read_text()
    make_token_private(path)
    assert path.read_text() == first
    assert (first == "of another cluster") == (mode is not None)
    assert len(first) == 64 or mode is not None
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
