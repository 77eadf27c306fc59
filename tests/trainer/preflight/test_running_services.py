"""A tool server that nobody answers is told before anything starts."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("verl")

from verl_loop import composed

from verl_tool.agent_loop.verl.config import options_in
from verl_tool.errors import ConfigError
from verl_tool.servers.serve.ports import free_ports
from verl_tool.trainer.preflight import running_services
from verl_tool.trainer.preflight.running_services import check_reward_servers, check_tool_server

AGENT = "actor_rollout_ref.agent"


def config(port: int, *overrides: str):
    return composed(
        f"{AGENT}.action_stop_tokens=['<call>']", f"{AGENT}.tool_server_url=http://127.0.0.1:{port}", *overrides
    )


def check_server(port: int, *overrides: str) -> None:
    composed_config = config(port, *overrides)
    check_tool_server(composed_config, options_in(composed_config))


def test_an_address_where_nobody_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_services, "ANSWER_SECONDS", 0.5)
    (port,) = free_ports(1)
    with pytest.raises(ConfigError, match=rf"no tool server answers at http://127.0.0.1:{port} .*TOOL_SERVER_URL"):
        check_server(port)
    check_server(port, f"{AGENT}.enable_agent=false")
    check_server(port, "actor_rollout_ref.replay=/some/where")


def test_a_judge_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_services, "ANSWER_SECONDS", 0.5)
    (port,) = free_ports(1)
    judge = f"http://127.0.0.1:{port}/v1"
    nested = f"+reward.reward_kwargs.sources.a.judge_url={judge}"
    with pytest.raises(ConfigError, match=rf"reward\.reward_kwargs\.sources\.a\.judge_url={judge}: nobody answers"):
        check_reward_servers(config(1, nested))
    with pytest.raises(ConfigError, match=r"reward\.sandbox_fusion\.url"):
        check_reward_servers(config(1, f"reward.sandbox_fusion.url={judge}"))
    check_reward_servers(config(1, "+reward.reward_kwargs.other=http-text"))


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:{}", "http://user:word@localhost:{}/v1/", "https://127.0.0.1:{}"]
)
def test_a_server_of_any_kind_counts_busy_or_not(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # which says nothing
        judge = address.format(server.getsockname()[1])
        check_reward_servers(config(1, f"reward.sandbox_fusion.url={judge}"))


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sandbox_fusion\.url=http://judge:no: .* is no address of a server"):
        check_reward_servers(config(1, "reward.sandbox_fusion.url='http://judge:no'"))


def test_a_proxy_is_taken_to_reach_what_lies_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_services, "ANSWER_SECONDS", 0.5)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    check_reward_servers(config(1, "reward.sandbox_fusion.url=http://judge.invalid/run"))
