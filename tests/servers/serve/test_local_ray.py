"""What is private of a Ray cluster of this machine. Where its processes listen: `test_ray_serve_cli.py`."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray")

from ray._private import ray_constants, services

from verl_tool.servers.serve import local_ray
from verl_tool.servers.serve.local_ray import (
    folder_for_sockets,
    keep_token_private,
    make_token,
    on_loopback,
    private_folder,
)

pytestmark = pytest.mark.slow

MAKE_TOKEN = "from verl_tool.servers.serve.local_ray import make_token; make_token()"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("verl_tool.servers.serve.local_ray._LONGEST_TEMP", 1000)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


def test_a_node_is_on_loopback_within_the_block_only(monkeypatch):
    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda _address: "10.0.0.7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth3")
    with on_loopback():
        assert services.get_node_ip_address() == "127.0.0.1"
        assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth3"
    assert services.get_node_ip_address() == "10.0.0.7"
    assert "VLLM_HOST_IP" not in os.environ
    assert ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.parametrize(("node", "told"), [("127.0.0.1", "10.0.0.7"), ("10.0.0.8", "10.0.0.8")])
def test_a_node_tells_others_an_address_that_they_reach(monkeypatch, node, told):
    monkeypatch.setattr(local_ray, "node_ip_address_from_perspective", lambda: "10.0.0.7")
    monkeypatch.setattr(local_ray.ray.util, "get_node_ip_address", lambda: node)
    assert local_ray.network_address() == told


def test_who_joins_makes_no_token(home):
    keep_token_private()
    assert os.listdir(home) == []


def test_the_token_is_for_its_owner_only(home):
    make_token()
    token = home / ".ray" / "auth_token"
    assert len(token.read_text()) > 30
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)


def test_a_token_that_all_can_read_is_closed_and_kept(home):
    token = home / ".ray" / "auth_token"
    token.parent.mkdir(mode=0o755)
    token.write_text("rays own")
    token.chmod(0o644)
    keep_token_private()
    assert (token.read_text(), mode(token), mode(token.parent)) == ("rays own", 0o600, 0o700)


def test_a_named_token_file_is_closed_and_its_folder_left_alone(home, monkeypatch):
    token = home / "shared" / "token"
    token.parent.mkdir(mode=0o755)
    token.write_text("ours")
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    keep_token_private()
    assert (mode(token), mode(token.parent)) == (0o600, 0o755)
    assert not (home / ".ray").exists()


def test_processes_that_start_together_share_one_token(home):
    started = [subprocess.Popen([sys.executable, "-c", MAKE_TOKEN]) for _ in range(3)]
    seen = set()
    while any(process.poll() is None for process in started):
        if (home / ".ray" / "auth_token").exists():
            seen.add((home / ".ray" / "auth_token").read_text())
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(seen) == 1
    assert os.listdir(home / ".ray") == ["auth_token"]


def test_without_authentication_no_token_is_made(home, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    make_token()
    assert not (home / ".ray").exists()


def test_rays_folder_is_within_one_that_others_cannot_enter(temp):
    folder = private_folder()
    assert (folder, mode(folder.parent)) == (temp / f"verl-tool-{os.geteuid()}" / "ray", 0o700)
    folder.parent.chmod(0o777)
    assert private_folder() == folder
    assert mode(folder.parent) == 0o700


def test_a_name_that_somebody_took_is_not_used(temp, tmp_path_factory):
    (temp / f"verl-tool-{os.geteuid()}").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    folder = private_folder()
    assert folder.parent.parent == temp
    assert not folder.parent.is_symlink()
    assert mode(folder.parent) == 0o700


def test_no_folder_is_too_long_for_a_socket(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    assert private_folder().parent.parent == Path("/tmp")
    assert folder_for_sockets(24) == Path("/tmp")
    monkeypatch.setenv("RAY_TMPDIR", "/dev/shm")
    assert (folder_for_sockets(8), folder_for_sockets(7)) == (Path("/dev/shm"), Path("/tmp"))
