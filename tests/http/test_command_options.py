"""Options that several commands have in common."""

import pytest
import typer
from typer.testing import CliRunner

from verl_tool.http.command_options import host_names
from verl_tool.retrieval.serving.retrieval_cli import serve
from verl_tool.servers.ray_serve import serve_tools


@pytest.mark.parametrize(
    ("command", "needed"), [(serve_tools, ["--tool_type", "finish"]), (serve, ["--index", "."])], ids=["tools", "index"]
)
def test_a_log_level_that_there_is_not_is_refused_before_anything_starts(command, needed):
    app = typer.Typer()
    app.command()(command)
    finished = CliRunner().invoke(app, [*needed, "--log_level", "silly"])
    assert finished.exit_code == 2
    assert "'silly' is not one of" in " ".join(finished.output.split())


def test_names_of_hosts_may_have_ports_and_spaces():
    assert host_names(" a.example, b.example:80 ,") == ("a.example", "b.example:80")
    assert host_names("") == ()
