"""The command as users run it, on this machine's CPU, for real: what runs, what is skipped and why, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from verl_tool.doctor.gpu_smoke.smoke_cli import command  # noqa: E402

ROOT = Path(__file__).parents[3]
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""
ENGINE_AND_TRAINER = ("vllm", "ray", "verl", "tensordict", "transfer_queue", "hydra", "omegaconf")
ALSO_THE_LOOP = (*ENGINE_AND_TRAINER, "msgspec", "aiohttp", "uvicorn", "starlette", "uvloop", "peft")


def run(folder: Path, *arguments: str, without: tuple[str, ...] = (), seconds: float = 600) -> tuple[int, dict, str]:
    """Exit code, report and output. In all processes the packages in `without` cannot be imported."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(BLOCKER.format(blocked=set(without)) if without else "")
    report = folder / "report.json"
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_smoke.sh"), "--output", str(report), "--folder", str(folder), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(folder / "site"),
            "VERL_TOOL_SKIP_INSTALL": "1",
            "VERL_TOOL_VENV": sys.prefix,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return done.returncode, json.loads(report.read_text()) if report.exists() else {}, done.stdout + done.stderr


def statuses(report: dict) -> dict[str, str]:
    return {part["name"]: part["status"] for part in report["parts"]}


def reasons(report: dict) -> dict[str, str]:
    return {part["name"]: part["reason"] for part in report["parts"]}


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_machine_with_torch_and_transformers_alone_runs_the_loop_and_names_what_is_missing(tmp_path):
    parts = "device,generator,loop,update,losses,engine,grpo,resume"
    code, report, printed = run(tmp_path, "--parts", parts, without=ENGINE_AND_TRAINER)
    assert code == 0, printed
    assert {name for name, status in statuses(report).items() if status == "passed"} == {
        *("device", "generator", "loop", "update")
    }, printed
    assert reasons(report)["losses"] == "not installed: verl, tensordict, ray"
    assert reasons(report)["engine"].startswith("not installed: vllm")
    assert "ray, verl" in reasons(report)["grpo"]
    by_name = {part["name"]: part for part in report["parts"]}
    assert by_name["loop"]["figures"]["calls"] >= 16
    assert by_name["loop"]["figures"]["logprob_diff_max"] < 1e-3
    assert by_name["update"]["figures"]["loss_after"] < by_name["update"]["figures"]["loss_before"]
    assert "vllm" not in " ".join(report["machine"]["versions"])
    assert str(tmp_path) not in json.dumps(report)


@pytest.mark.slow
def test_without_the_loops_packages_the_rest_runs_still(tmp_path):
    code, report, printed = run(tmp_path, "--parts", "device,loop,update", without=ALSO_THE_LOOP)
    assert code == 0, printed
    assert statuses(report) == {"device": "passed", "loop": "skipped", "update": "skipped"}
    assert reasons(report)["loop"] == "not installed: msgspec"


@pytest.mark.slow
def test_a_failed_part_gives_exit_code_1_and_what_continues_it_is_skipped(tmp_path):
    (tmp_path / "text_model").mkdir()
    (tmp_path / "text_model" / "tokenizer_config.json").write_text("{")  # no model
    code, report, printed = run(tmp_path, "--parts", "loop,update")
    assert code == 1, printed
    assert statuses(report) == {"loop": "failed", "update": "skipped"}
    assert reasons(report)["update"] == "it continues another part: loop failed"


def invoke(folder: Path, *arguments: str) -> tuple[int, dict, str]:
    """The same in this process, for what starts no part."""
    app, report = typer.Typer(), folder / "report.json"
    app.command()(command)
    with restored_signals():
        result = CliRunner(env={"COLUMNS": "200"}).invoke(
            app, ["--output", str(report), "--folder", str(folder), "--device", "cpu", *arguments]
        )
    return result.exit_code, json.loads(report.read_text()) if report.exists() else {}, result.output


@contextmanager
def restored_signals() -> Iterator[None]:
    """The command handles SIGTERM as long as its process lives."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_part_begins_behind_the_limit(tmp_path):
    code, report, printed = invoke(tmp_path, "--parts", "device,attention", "--minutes", "0.1")
    assert code == 0, printed
    assert set(statuses(report).values()) == {"skipped"}
    assert "no time left" in reasons(report)["device"]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--parts", "gpro"), "part 'gpro' is unknown; known: device"),
        (("--device", "tpu"), "--device is 'tpu'; it must be auto, cuda or cpu"),
        (("--device", "cuda"), "torch finds no GPU"),
    ],
)
def test_usage_errors_give_exit_code_2(tmp_path, arguments, cause):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, report, printed = invoke(tmp_path, *arguments)
    assert (code, report) == (2, {})
    assert cause in printed


def test_parts_are_listed(tmp_path):
    code, _, printed = invoke(tmp_path, "--list")
    assert code == 0
    assert "two steps of GRPO" in printed
