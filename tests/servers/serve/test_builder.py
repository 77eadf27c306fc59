"""The application for Serve's own commands, as far as it needs no cluster: arguments, files, ``serve build``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from pydantic import ValidationError
from ray.serve import scripts
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as built
from ray.serve.schema import ServeDeploySchema

from verl_tool.errors import ConfigError
from verl_tool.servers.serve.builder import ToolServerArgs, tool_server
from verl_tool.servers.serve.deployment import DEPLOYMENT
from verl_tool.servers.settings import AutoscalingSettings

EXAMPLES = Path(__file__).parents[3] / "examples" / "serve"


def config(name: str) -> dict:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def bound(application) -> ToolServerArgs:
    """What the replicas are given."""
    [settings] = application._bound_deployment.init_args
    return settings


def test_the_arguments_are_the_settings_of_the_server(monkeypatch):
    monkeypatch.delenv("VERL_TOOL_API_KEY", raising=False)
    # As `serve run` has them: texts.
    application = built(tool_server, {"tool_type": "calculator", "num_replicas": "3", "state_ttl_seconds": "60"})
    assert application._bound_deployment.num_replicas == 3
    assert bound(application).state_ttl_seconds == 60.0
    assert bound(application).api_key is None
    assert bound(application).several_nodes
    scaled = built(tool_server, {"tool_type": "calculator", "num_replicas": {"min_replicas": 2, "max_replicas": 4}})
    assert bound(scaled).num_replicas == AutoscalingSettings(min_replicas=2, max_replicas=4)


def test_the_api_key_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("VERL_TOOL_API_KEY", "of the environment")
    assert bound(built(tool_server, {"tool_type": "calculator"})).api_key == "of the environment"
    assert bound(built(tool_server, {"tool_type": "calculator", "api_key": "given"})).api_key == "given"


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ({"tool_type": "calculater"}, ConfigError, "'calculater' is unknown"),
        ({"tool_type": "calculator", "replicas": 2}, ValidationError, "replicas"),
        ({"tool_type": "calculator", "num_replicas": 0}, ValidationError, "num_replicas"),
    ],
)
def test_what_is_wrong_is_named_before_a_replica_starts(args, error, words):
    with pytest.raises(error, match=words):
        built(tool_server, args)


def test_the_ray_service_has_the_application_of_the_other_file():
    service = config("ray_service.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    on_kubernetes = yaml.safe_load(service["spec"]["serveConfigV2"])
    here = config("tool_server.yaml")
    # On one machine, and on its loopback interface.
    own, there = here["applications"][0]["args"], on_kubernetes["applications"][0]["args"]
    assert own.pop("several_nodes") is False
    assert [args.pop("listen_host") for args in (own, there)] == ["127.0.0.1", "0.0.0.0"]
    assert [args.pop("listen_port") for args in (own, there)] == [5000, 8000]
    assert on_kubernetes == here
    for file in (on_kubernetes, config("tool_server.yaml")):
        [application] = ServeDeploySchema.model_validate(file).applications
        built(tool_server, application.args)
    cluster = service["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for container in (pod["template"]["spec"]["containers"][0] for pod in pods):
        assert [variable["name"] for variable in container["env"]] == ["VERL_TOOL_API_KEY"]


def test_serve_build_writes_a_config_of_the_example(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "tool_server", raising=False)  # a benchmark has that name too
    out = tmp_path / "built.yaml"
    run = CliRunner().invoke(scripts.cli, ["build", "--app-dir", str(EXAMPLES), "tool_server:app", "-o", str(out)])
    assert run.exit_code == 0, run.output
    [application] = ServeDeploySchema.model_validate(yaml.safe_load(out.read_text(encoding="utf-8"))).applications
    assert application.import_path == "tool_server:app"
    assert [deployment.name for deployment in application.deployments] == [DEPLOYMENT]
