"""Keys of ``task.toml``."""

from __future__ import annotations

import pytest

from verl_tool.errors import ConfigError
from verl_tool.tasks.task_config import parse_config, requested_hosts

# As Harbor 0.26 writes the defaults of its own models.
DEFAULTS = """
schema_version = "1.4"
artifacts = []
[task]
name = "org/count"
description = ""
authors = []
keywords = []
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 600.0
collect = []
env = {}
[agent]
[environment]
network_mode = "no-network"
build_timeout_sec = 600.0
os = "linux"
mcp_servers = []
gpus = 0
env = {}
[solution.env]
"""


def test_defaults_of_harbor_are_accepted() -> None:
    config = parse_config(DEFAULTS)
    assert (config.environment.build_timeout_sec, config.verifier.timeout_sec) == (600, 600)


def test_older_forms() -> None:
    config = parse_config("version = '1.0'\n[environment]\nmemory = '2G'\nstorage = '512M'\nallow_internet = false")
    assert (config.environment.memory, config.environment.storage) == (2048, 512)
    assert parse_config("[environment]\nmemory_mb = 2048\nmemory = '2G'").environment.memory_mb == 2048


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("verifier = 1", r"verifier must be a table, as \[verifier\]"),
        ("[verifier]\nmode = 'x'", r"verifier\.mode is not supported here; known: timeout_sec, user, "),
        ("task_name = 'a'", "task_name is not supported here; known: version, schema_version"),
        ("schema_version = '2.0'", "schema_version '2.0' is unknown; known: 1.0, 1.1, 1.2, 1.3, 1.4"),
        ("[[steps]]\nname = 'a'", "steps: a task has one instruction"),
        ("multi_step_reward_strategy = 'mean'", "steps: a task has one instruction"),
        ("[verifier]\ntimeout_sec = -1", r"verifier\.timeout_sec is -1: .* greater than 0"),
        ("[agent]\ntimeout_sec = 'long'", r"agent\.timeout_sec is 'long'"),
        ("[verifier]\nenv = {KEY = '${KEY}'}", r"verifier\.env\.KEY takes a variable of the host"),
        ("[environment]\nenv = {KEY = '${KEY}'}", r"environment\.env\.KEY takes a variable of the host"),
        ('[environment]\nenv = {KEY = "a\\nb"}', r"environment\.env\.KEY has more than one line"),
        ("[environment]\ngpus = 1", r"environment\.gpus"),
        ("[environment.tpu]\ntype = 'v6e'", r"environment\.tpu"),
        ("[environment]\nos = 'Windows'", r"environment\.os 'Windows' is not supported"),
        ("[environment]\nmemory = '2G'\nmemory_mb = 4", "memory is 2048 MB, and memory_mb is 4"),
        ("[environment]\nmemory = 'large'", r"environment\.memory is 'large': give a size such as '2G'"),
        ("[environment]\nmemory = 2048", r"environment\.memory is 2048: give a size such as '2G'"),
        ("[environment]\nmemory_mb = '2G'", r"environment\.memory_mb is '2G'"),
        ("[environment]\nworkdir = 'app'", r"environment\.workdir is 'app'"),
        ("[[environment.mcp_servers]]\nname = 'a'", r"environment\.mcp_servers is not supported"),
        ("[environment]\nskills_dir = '/skills'", r"environment\.skills_dir is not supported"),
        ("[environment.healthcheck]\ncommand = 'true'", r"environment\.healthcheck is not supported"),
        ("[verifier]\nenvironment_mode = 'separate'", r"verifier\.environment and environment_mode 'separate'"),
        ("[verifier.environment]\ncpus = 1", r"verifier\.environment and environment_mode 'separate'"),
        ("[[verifier.collect]]\ncommand = 'true'", r"verifier\.collect is not supported"),
        ("[agent]\nuser = 'ada'\n[verifier]\nuser = 'bob'", r"agent\.user is 'ada' and verifier\.user 'bob'"),
        ("[verifier]\nuser = 1000", r"agent\.user is None and verifier\.user 1000"),
        ("[environment]\nallow_internet = true", r"environment\.allow_internet is true, .*--offline"),
        ("[environment]\nnetwork_mode = 'public'", r"environment\.network_mode is 'public'"),
        ("[verifier]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.b']", r"verifier\.network_mode is 'allowlist'"),
        ("[environment]\nallowed_hosts = ['a.b']", r"environment\.allowed_hosts is \['a\.b'\]"),
        ("[agent]\nnetwork_mode = 'public'", r"agent\.network_mode is 'public'"),
        ("version = ", "is no TOML"),
    ],
)
def test_what_is_not_supported_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(text)


def test_all_problems_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"gpus.*; task\.toml: environment\.skills_dir.*; .*allow_internet"):
        parse_config("[environment]\ngpus = 1\nskills_dir = '/s'\nallow_internet = true")


def test_tasks_that_request_a_network_run_without_one_on_demand() -> None:
    parse_config("[environment]\nnetwork_mode = 'public'\n[agent]\nnetwork_mode = 'public'", any_network=True)


@pytest.mark.parametrize(
    ("text", "agent", "verifier"),
    [
        ("", ("*",), ("*",)),
        ("[environment]\nallow_internet = false", (), ()),
        ("[environment]\nallow_internet = true", ("*",), ("*",)),
        ("[environment]\nallow_internet = true\nnetwork_mode = 'no-network'", (), ()),
        ("[environment]\nnetwork_mode = 'public'", ("*",), ("*",)),
        (
            "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['pypi.org', '*.a.b']",
            *[("pypi.org", "*.a.b")] * 2,
        ),
        ("[agent]\nnetwork_mode = 'no-network'", (), ("*",)),
        (
            "environment.network_mode = 'no-network'\nverifier = {network_mode = 'allowlist', allowed_hosts = ['a.b']}",
            (),
            ("a.b",),
        ),
    ],
)
def test_requested_hosts(text: str, agent: tuple[str, ...], verifier: tuple[str, ...]) -> None:
    config = parse_config(text, any_network=True)
    assert (requested_hosts(config.agent, config), requested_hosts(config.verifier, config)) == (agent, verifier)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("http://pypi.org", "is no host"),
        ("pypi.org:8080", "has a port, or an address that is not public"),
        ("127.0.0.1", "has a port, or an address that is not public"),
        ("::1", "has a port, or an address that is not public"),
    ],
)
def test_tasks_reach_public_hosts_only(host: str, words: str) -> None:
    text = "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['pypi.org', '1.1.1.0/24', '2606:4700::1']"
    config = parse_config(text, any_network=True)
    assert requested_hosts(config.agent, config) == ("pypi.org", "1.1.1.0/24", "[2606:4700::1]")
    config = parse_config(text.replace("pypi.org", host), any_network=True)
    with pytest.raises(ConfigError, match=words):
        requested_hosts(config.verifier, config)


def test_a_variable_of_the_host_has_its_default() -> None:
    config = parse_config("[verifier.env]\nA = '${KEY:-x y}'\nB = '${KEY:-}'\n[environment]\nmemory_mb = 4096.0")
    assert (config.verifier.env, config.environment.memory_mb) == ({"A": "x y", "B": ""}, 4096)
    for text in ("verifier.env.A = '${KEY}'", "environment.memory_mb = 4096.5"):
        with pytest.raises(ConfigError):
            parse_config(text)


def test_texts_that_only_look_like_variables_are_taken() -> None:
    assert parse_config("[verifier.env]\nPRICE = 'from ${A} on'").verifier.env == {"PRICE": "from ${A} on"}
