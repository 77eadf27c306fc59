"""What a replica takes from its cluster. That it finds it there is tested by a live one (`test_ray_serve_shared`)."""

from __future__ import annotations

import pytest

from verl_tool.errors import ConfigError
from verl_tool.servers.serve import cluster_settings
from verl_tool.servers.serve.builder import ToolServerArgs
from verl_tool.servers.serve.cluster_settings import completed
from verl_tool.servers.settings import ReplicaSettings


def test_the_settings_of_a_launcher_are_whole():
    settings = ReplicaSettings(server="a-server", tool_type="calculator")
    assert completed(settings) is settings


def test_one_machine_is_not_taken_for_granted(monkeypatch):
    """A replica at 127.0.0.1 of another node would be taken for dead, with the trajectories that it holds."""
    monkeypatch.setattr(cluster_settings.ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}, {"Alive": True}])
    with pytest.raises(ConfigError, match="several_nodes is false and the Ray cluster has 2 nodes"):
        completed(ToolServerArgs(tool_type="calculator", several_nodes=False))
