"""What a recipe makes before a training, and its report."""

from __future__ import annotations

import pytest

pytest.importorskip("hydra")

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from verl_tool.errors import ConfigError
from verl_tool.trainer import recipe
from verl_tool.trainer.recipe import RecipeError, make_inputs, make_tool_data, tool_data_to_make

SCRIPT = """
import sys, pathlib
file, *words = sys.argv[1:]
pathlib.Path(file).parent.mkdir(parents=True, exist_ok=True)
with open(file, "a") as f:
    f.write(" ".join(words) + "\\n")
print("made", file)
"""


@pytest.fixture
def console(tmp_path):
    with (tmp_path / "console").open("w+") as file:
        yield Console(file=file)


@pytest.fixture
def make(tmp_path, console):
    """Make the inputs of a recipe with these settings, in a folder with a space in its name."""
    script = tmp_path / "make.py"
    script.write_text(SCRIPT)

    def made(**settings: object) -> DictConfig:
        values = {
            "model": "some/model",
            "data": "${run_dir}/data",
            "size": 3,
            "tool_data": None,
            "make_tool_data": [f"{script} ${{recipe.tool_data}}/database ${{recipe.size}}"],
            "make_source": [f"{script} ${{recipe.data}}/source ${{recipe.size}}"],
            "make_data": [f"{script} ${{recipe.data}}/train.parquet ${{files}} ${{recipe.empty}}"],
            "make_model": [f"{script} ${{run_dir}}/model/model.safetensors tiny"],
            "empty": "",
            "report": None,
        }
        files = ["${recipe.data}/a b", "c"]
        config = OmegaConf.create({"run_dir": f"{tmp_path}/the run", "files": files, "recipe": values | settings})
        config.tool_data_was_made = make_tool_data(config, console)
        config.was_made = make_inputs(config, console)
        return config

    return made


def test_data_and_a_tiny_model_are_made_once(make, tmp_path):
    assert make(model="tiny").was_made
    assert not make(model="tiny").was_made
    run = tmp_path / "the run"
    assert (run / "data" / "source").read_text() == "3\n"
    assert (run / "data" / "train.parquet").read_text() == f"[{run}/data/a b,c]\n"
    assert (run / "model" / "model.safetensors").read_text() == "tiny\n"
    assert (tmp_path / "console").read_text().count("made") == 3


def test_what_tools_read_is_made_once(make, tmp_path):
    folder = tmp_path / "databases"
    told = OmegaConf.create({"recipe": {"tool_data": str(folder), "make_tool_data": ["make.py"]}})
    assert tool_data_to_make(told) == folder
    assert make(tool_data=str(folder)).tool_data_was_made
    assert not make(tool_data=str(folder)).tool_data_was_made
    assert tool_data_to_make(told) is None
    assert (folder / "database").read_text() == "3\n"
    with pytest.raises(ConfigError, match="database 4"):
        make(tool_data=str(folder), size=4)
    with pytest.raises(RecipeError, match=f"made no {tmp_path}/none"):
        make(tool_data=f"{tmp_path}/none", make_tool_data=[f"{tmp_path}/make.py {tmp_path}/elsewhere"])
    assert not make().tool_data_was_made


def test_a_model_that_is_given_is_not_made(make, tmp_path):
    make()
    assert not (tmp_path / "the run" / "model").exists()


def test_what_other_commands_made_is_refused_wherever_the_folder_is(make, tmp_path):
    make()
    with pytest.raises(ConfigError, match="RUN or DATA, or delete") as caught:
        make(size=4)
    assert "source 3" in str(caught.value)
    assert "source 4" in str(caught.value)
    (tmp_path / "the run" / "data").rename(tmp_path / "moved")
    make(data=f"{tmp_path}/moved")
    with pytest.raises(ConfigError):
        make(data=f"{tmp_path}/moved", size=4)


def test_data_of_one_s_own_are_taken_as_they_are(make, tmp_path):
    (tmp_path / "train.parquet").write_text("mine")
    make(data=str(tmp_path))
    assert (tmp_path / "train.parquet").read_text() == "mine"


def test_a_command_that_fails_is_named_and_its_folder_is_not_taken_for_made(make, tmp_path):
    (tmp_path / "fail.py").write_text("raise SystemExit(3)")
    with pytest.raises(RecipeError, match=r"fail\.py --now` ended with exit code 3"):
        make(make_data=[f"{tmp_path}/fail.py --now"])
    assert not (tmp_path / "the run" / "data" / recipe.MADE_BY).exists()
    make()


def test_commands_that_make_something_else_are_told(make):
    with pytest.raises(RecipeError, match=r"made no .*train\.parquet"):
        make(make_data=[])
    make(make_source=[], make_data=[])


def test_the_report_s_exit_code_is_told(make, tmp_path):
    (tmp_path / "report.py").write_text("import sys; sys.exit(len(sys.argv[1]) > 1)")
    assert recipe.report(make(report=f"{tmp_path}/report.py ${{run_dir}}")) == 1
    assert recipe.report(make()) == 0
    assert recipe.report(OmegaConf.create({"recipe": None})) == 0


def test_a_command_with_a_value_that_is_null_is_refused(make):
    with pytest.raises(ConfigError, match=r"needs \$\{recipe.report\}, which is null"):
        make(make_data=["make.py --tool_type ${recipe.report}"])
