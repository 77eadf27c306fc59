"""What a training tells Ray. Where its processes then listen is looked at in every training (`calculator_run.py`)."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

pytest.importorskip("ray")
omegaconf = pytest.importorskip("omegaconf")
pytest.importorskip("wrapt")

from ray._private import services  # noqa: E402

from verl_tool.platforms.weight_sync import FOLDER  # noqa: E402
from verl_tool.trainer import ray_settings as module  # noqa: E402


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "there is one")
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setattr(services, "node_ip_address_from_perspective", lambda _address: "10.0.0.7")
    options = {"num_cpus": 3, "runtime_env": {"env_vars": {"A": "b"}}}
    config = omegaconf.OmegaConf.create({"ray_kwargs": {"ray_init": options}})
    omegaconf.OmegaConf.set_struct(config, True)
    return config


def joins(monkeypatch, address: str | None) -> None:
    monkeypatch.setattr(module, "address_to_join", lambda _given: address)


def test_alone_it_starts_a_private_ray_on_loopback(config, monkeypatch):
    joins(monkeypatch, None)
    with module.ray_settings(config):
        told = config.ray_kwargs.ray_init
        assert (told.address, told.num_cpus, told.runtime_env.env_vars.A) == ("local", 3, "b")
        assert stat.S_IMODE(Path(told._temp_dir).parent.stat().st_mode) == 0o700
        assert services.get_node_ip_address() == "127.0.0.1"
    assert services.get_node_ip_address() == "10.0.0.7"


def test_each_run_has_a_folder_for_its_sockets(config, monkeypatch):
    joins(monkeypatch, None)
    folders = []
    for _ in range(2):
        with module.ray_settings(config):
            folders.append(Path(config.ray_kwargs.ray_init.runtime_env.env_vars[FOLDER]))
            assert stat.S_IMODE(folders[-1].stat().st_mode) == 0o700
        assert not folders[-1].exists()
    assert folders[0] != folders[1]


def test_a_cluster_is_joined_as_it_is(config, monkeypatch):
    joins(monkeypatch, "10.0.0.8:6379")
    with module.ray_settings(config):
        assert set(config.ray_kwargs.ray_init) == {"num_cpus", "runtime_env"}
        assert FOLDER in config.ray_kwargs.ray_init.runtime_env.env_vars
        assert services.get_node_ip_address() == "10.0.0.7"


def test_an_address_of_the_network_is_kept(config, monkeypatch):
    joins(monkeypatch, None)
    omegaconf.OmegaConf.set_struct(config, False)
    config.ray_kwargs.ray_init._node_ip_address = "10.0.0.7"
    with module.ray_settings(config):
        assert config.ray_kwargs.ray_init.address == "local"
        assert services.get_node_ip_address() == "10.0.0.7"
