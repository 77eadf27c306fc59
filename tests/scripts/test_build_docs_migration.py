"""The options of ours that the pages about moving from another project name are there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from typer import Typer
from typer.main import get_command

from eval_service import evaluate
from verl_tool.agent_loop.options import _REPLACEMENTS, EpisodeOptions
from verl_tool.servers import ray_serve

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "assets/docs").glob("migration_*.md"))
CONFIG_PATH = re.compile(r"(?:actor_rollout_ref|algorithm|data|reward|tool_server|trainer)(?:\.\w+)+")


def cells_about_us(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the heading of the first column and each cell of the column about this project."""
    first = ""
    for line in page.read_text("utf-8").splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[1] in ("Here", "`verl_tool.servers.ray_serve`"):
            first = cells[0]
        elif not set(cells[1]) <= set("-"):
            yield first, cells[1]


def names(cell: str) -> list[str]:
    return [name.partition("=")[0] for name in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def config() -> DictConfig:
    pytest.importorskip("verl")
    pytest.importorskip("verl_tool.trainer.main_ppo")  # adds verl's configs to Hydra's search path
    with initialize_config_dir(str(ROOT / "verl_tool/trainer/config"), version_base=None):
        return compose("agent_ppo_trainer")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_of_a_training_exist(page: Path, config: DictConfig) -> None:
    found = [name for _, cell in cells_about_us(page) for name in names(cell) if CONFIG_PATH.fullmatch(name)]
    assert found
    missing = object()
    assert not [
        name for name in found if OmegaConf.select(config, name, default=missing, throw_on_missing=False) is missing
    ]


def test_options_of_the_agent_are_those_of_the_loop() -> None:
    page = ROOT / "assets/docs/migration_verl_tool.md"
    found = {
        name
        for line in page.read_text("utf-8").split("## Tool server")[0].splitlines()
        if line.startswith("| `")
        for name in names(re.split(r"(?<!\\)\|", line)[2])
    }
    assert len(found) > 20
    assert found - {"actor_rollout_ref.rollout.n"} <= set(EpisodeOptions.model_fields) | {"null"}
    refused = re.search(r"^\| (`retokenization`[^|]*)\|", page.read_text("utf-8"), re.MULTILINE)
    assert refused
    assert set(names(refused[1])) <= set(_REPLACEMENTS)


@pytest.mark.parametrize(
    ("page", "table", "function"),
    [
        ("migration_verl_tool.md", "`verl_tool.servers.serve`", ray_serve.serve_tools),
        ("migration_verifiers.md", "`eval` of verifiers", evaluate.command),
    ],
)
def test_options_of_the_commands_exist(page: str, table: str, function: Callable[..., None]) -> None:
    cells = [cell for first, cell in cells_about_us(ROOT / "assets/docs" / page) if first == table]
    found = {name for cell in cells for name in names(cell) if name.startswith("--")}
    assert found
    app = Typer()
    app.command()(function)
    assert found <= {option for each in get_command(app).params for option in each.opts}
