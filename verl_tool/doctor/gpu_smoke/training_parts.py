"""Parts that train: the recipe `calculator` by its own script, with a random model, a tool that every turn calls and a
reward that differs between trajectories."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from verl_tool.doctor.gpu_smoke import tiny_models
from verl_tool.doctor.gpu_smoke.count_tool import STOPS
from verl_tool.doctor.gpu_smoke.part import Figures, PartContext, PartFailed, PartSkipped

STEPS = 2
LEARNING_RATE = 5e-3
"""High enough that a step's new weights give clearly other log-probabilities."""
FP8_CAPABILITY = (8, 9)
FP8_BLOCK = 128
"""verl scales square blocks of so many rows and columns of a weight."""
FP8_HIDDEN = 2 * FP8_BLOCK
"""Width of the model of `check_fp8`. verl 0.9.0 drops the last dimension of a weight's scales where it is 1
(``quant_weights``), and vLLM rejects the scales: of weights with no more columns than a block."""
WEIGHT_SYNC_SECONDS = 60
"""Below the deadlines of the parts, so that a training itself reports an engine that takes no weights. On GPUs."""
STALE_RATIO = 3.0
"""How many times nearer the engine's log-probabilities must be to the new weights than to the old ones."""
_HERE = Path(__file__).parent
_VARIABLES = {
    "BATCH_SIZE": "8",
    "MINI_BATCH_SIZE": "8",
    "MICRO_BATCH_SIZE": "8",
    "N": "4",
    "MAX_PROMPT_LENGTH": "64",
    "MAX_RESPONSE_LENGTH": "64",
    "MAX_OBS_LENGTH": "16",
    "MAX_TURNS": "3",
    "REWARD": "LetterRewardManager",
    "LOGGER": "[console,file]",
    "SAVE_FREQ": "-1",
    "TEST_FREQ": "-1",
    "N_GPUS": "1",
    "GPU_MEMORY": "0.3",
}


def check_grpo(context: PartContext) -> Figures:
    """Two steps of GRPO, with a checkpoint for `check_resume` at the end."""
    figures = train(context, "grpo", variables={"SAVE_FREQ": str(STEPS)})
    if context.device == "cuda" and find_spec("flash_attn") is None:
        figures["attention"] = "sdpa: flash-attn is not installed"
    return figures


def check_ppo(context: PartContext) -> Figures:
    """Two steps of PPO: advantages by GAE with a critic, which learns too."""
    figures = train(context, "ppo", variables={"ALGORITHM": "gae"})
    last = metrics_of(context.folder / "runs" / "ppo")[STEPS]
    return figures | {
        "critic_loss": _finite(last, "critic/vf_loss"),
        "critic_grad_norm": _finite(last, "critic/grad_norm"),
    }


def check_lora(context: PartContext) -> Figures:
    """Two steps that train an adapter, which alone is sent to the engine."""
    variables = {"LORA_RANK": "8", "LORA_ALPHA": "16"}
    return train(context, "lora", "actor_rollout_ref.model.target_modules=all-linear", variables=variables)


def check_fsdp2(context: PartContext) -> Figures:
    """Two steps with FSDP2 in place of FSDP. On a CPU all trainings have it."""
    if context.device == "cpu":
        raise PartSkipped("on a CPU every training has FSDP2")
    return train(context, "fsdp2", *(f"actor_rollout_ref.{part}.strategy=fsdp2" for part in ("actor", "ref")))


def check_fp8(context: PartContext) -> Figures:
    """Two steps whose trajectories are sampled in FP8."""
    if context.device != "cuda":
        raise PartSkipped("FP8 needs a GPU")
    capability = torch.cuda.get_device_capability()
    if capability < FP8_CAPABILITY:
        raise PartSkipped(f"FP8 needs compute capability 8.9, and this GPU has {'.'.join(map(str, capability))}")
    model = tiny_models.make_text_model(context.folder, FP8_HIDDEN)
    quantized = "actor_rollout_ref.rollout.quantization=fp8"
    return train(context, "fp8", quantized, variables={"MODEL": str(model)}, limited=False)


def check_ulysses(context: PartContext) -> Figures:
    """Two steps with each sequence split over two GPUs."""
    if context.device != "cuda" or torch.cuda.device_count() < 2:
        raise PartSkipped("Ulysses needs two GPUs")
    if find_spec("flash_attn") is None:
        raise PartSkipped("Ulysses needs flash-attn, which is not installed")
    size = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    return train(context, "ulysses", size, variables={"N_GPUS": "2"})


def check_resume(context: PartContext) -> Figures:
    """The run of `grpo` is started again for a third step, which goes on from its checkpoint."""
    run = context.folder / "runs" / "resume"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(context.folder / "runs" / "grpo", run)
    variables = {"SAVE_FREQ": str(STEPS), "STEPS": str(STEPS + 1)}
    figures = train(context, "resume", variables=variables, steps=(STEPS + 1,), begin_anew=False)
    if STEPS in metrics_of(run):
        raise PartFailed(f"step {STEPS} was trained again: the run did not go on from its checkpoint")
    return figures


def check_weight_sync(context: PartContext) -> Figures:
    """The engine samples step 2 with the weights that step 1 left.

    The log-probabilities that it told are those of the trainer, and clearly not those of the weights before step 1.
    """
    from verl_tool.agent_loop.trajectory import read_jsonl

    run = context.folder / "runs" / "grpo"
    old = tiny_models.load_text_model(tiny_models.make_text_model(context.folder), context.device)
    trained, stale = trained_log_probs(run, STEPS), tiny_models.Differences()
    with torch.no_grad():
        for trajectory in read_jsonl(run / "trajectories" / f"step_{STEPS}.jsonl"):
            mask = torch.tensor(trajectory.response_mask).bool()
            before = tiny_models.token_log_probs(old, trajectory.prompt_ids, trajectory.response_ids)
            stale.add(before.cpu()[mask], torch.tensor(trajectory.response_log_probs)[mask].tolist())
    figures = trained.check(context.device, "engine beside trainer, behind a sync")
    if not stale.mean > STALE_RATIO * trained.mean:
        raise PartFailed(
            f"the engine's log-probabilities differ by {trained.mean:.3g} from the trained weights' and by "
            f"{stale.mean:.3g} from the old ones'; the new weights did not arrive, or step 1 changed none"
        )
    return {**figures, "logprob_diff_mean_to_old_weights": stale.mean}


def check_determinism(context: PartContext) -> Figures:
    """Two runs with ``deterministic=true`` are the same, by ``python -m verl_tool.replay RUN --same_as OTHER``.

    A difference is a failure on a CPU, where it is promised, and a figure on a GPU, where nobody has tried it.
    """
    figures: Figures = {}
    for name in ("once", "again"):
        figures[name] = train(context, name, "deterministic=true")
    once, again = (context.folder / "runs" / name for name in ("once", "again"))
    compared = subprocess.run(
        [sys.executable, "-m", "verl_tool.replay", str(once), "--same_as", str(again)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(compared.stdout, compared.stderr)
    words = next((line for line in compared.stdout.splitlines() if "compared" in line), "")
    if compared.returncode == 2 or not words:
        raise PartFailed(f"the runs could not be compared: {(compared.stderr or compared.stdout).strip()[-300:]}")
    if compared.returncode and context.device == "cpu":
        raise PartFailed(f"deterministic=true, and {words}")
    return {"same": compared.returncode == 0, "compared": words, **figures}


def train(
    context: PartContext,
    name: str,
    *overrides: str,
    variables: dict[str, str] | None = None,
    steps: tuple[int, ...] = tuple(range(1, STEPS + 1)),
    begin_anew: bool = True,
    limited: bool = True,
) -> Figures:
    """Train in ``runs/NAME`` by the recipe's script; figures of its steps. Raises PartFailed if one is wrong.

    `limited`: the log-probabilities of rollout and trainer must agree; else their difference is a figure only.
    """
    run = context.folder / "runs" / name
    if begin_anew:
        shutil.rmtree(run, ignore_errors=True)
    environment = _environment(context, run) | (variables or {})
    script = tiny_models.RECIPES / "calculator" / "train.sh"
    printed = run.with_suffix(".stderr")
    printed.parent.mkdir(parents=True, exist_ok=True)
    command = ["bash", str(script), *_overrides(context), *overrides]
    with printed.open("w") as stderr:
        process = subprocess.Popen(command, env=environment, cwd=tiny_models.ROOT, stderr=stderr)
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(15)
        sys.stderr.write(printed.read_text(errors="replace"))
    if code:
        raise PartFailed(f"the training ended with code {code}: {last_words(printed, run / 'main_ppo.log')}")
    figures = step_figures(metrics_of(run), steps)
    differences = trained_log_probs(run, steps[-1])
    if limited:
        return figures | differences.check(context.device, "rollout beside trainer")
    return figures | {"logprob_diff_mean": differences.mean}


def trained_log_probs(run: Path, step: int) -> tiny_models.Differences:
    """The engine's log-probabilities of what a step sampled, beside the trainer's of the same tokens."""
    from verl_tool.agent_loop.trajectory import read_jsonl
    from verl_tool.trainer.monitoring.token_records import tokens_of

    records = run / "trajectories" / f"step_{step}.jsonl"
    differences = tiny_models.Differences()
    for line, trajectory in enumerate(read_jsonl(records)):
        mask = torch.tensor(trajectory.response_mask).bool()
        log_probs = torch.tensor(trajectory.response_log_probs)[mask].tolist()
        differences.add(torch.tensor(tokens_of(records, line)["log_probs"])[mask], log_probs)
    return differences


def step_figures(metrics: dict[int, dict[str, Any]], steps: tuple[int, ...]) -> Figures:
    """What the steps measured. Raises PartFailed for one that is missing, trained nothing, or had faults."""
    missing = [step for step in steps if step not in metrics]
    if missing:
        raise PartFailed(f"step {missing[0]} is not among the metrics")
    for step in steps:
        if not _finite(metrics[step], "actor/grad_norm") > 0:
            raise PartFailed(f"step {step}: the gradient is 0")
        if metrics[step].get("agent/faulted"):
            raise PartFailed(f"step {step}: {metrics[step]['agent/faulted']:.0%} of the trajectories ended in a fault")
    last = metrics[steps[-1]]
    names = {
        "step_seconds": "timing_s/step",
        "rollout_seconds": "timing_s/gen",
        "update_seconds": "timing_s/update_actor",
        "sync_seconds": "timing_s/update_weights",
        "actor_peak_gib": "perf/max_memory_allocated_gb",
        "probability_difference_mean": "training/rollout_probs_diff_mean",
        "probability_difference_max": "training/rollout_probs_diff_max",
        "grad_norm": "actor/grad_norm",
    }
    return {name: float(last[metric]) for name, metric in names.items() if metric in last}


def metrics_of(run: Path) -> dict[int, dict[str, Any]]:
    """Metrics of each step that the last start of a run trained."""
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {line["step"]: line["data"] for line in lines if "actor/grad_norm" in line["data"]}


def _environment(context: PartContext, run: Path) -> dict[str, str]:
    dropped = ("RAY_ADDRESS", "VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", "TOOL_SERVER_URL", "DRY_RUN", "USE_TOOL")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    profile = {"cuda": "gpu", "cpu": "cpu"}[context.device]
    return {
        **inherited,
        **_VARIABLES,
        "PROFILE": profile,
        "RUN": str(run),
        "DATA": str(make_rows(context.folder)),
        "MODEL": str(tiny_models.make_text_model(context.folder)),
        "STEPS": str(STEPS),
        "TOOLS": str(_HERE / "count_tool.py"),
        "STOPS": json.dumps(list(STOPS)),
        "LEARNING_RATE": str(LEARNING_RATE),
        # This environment, whatever it is.
        "VERL_TOOL_SKIP_INSTALL": "1",
        "VERL_TOOL_VENV": sys.prefix,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def _overrides(context: PartContext) -> list[str]:
    reward = _HERE / "letter_reward.py"
    found = [
        # What the checks before a training would say of a random model is known.
        "doctor=false",
        "trainer.val_before_train=false",
        "reward.reward_manager.source=importlib",
        f"reward.reward_manager.module.path={reward}",
        "recipe.report=null",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "reward.num_workers=1",
        # Places for actors, not cores: one that finds none waits for ever.
        "ray_kwargs.ray_init.num_cpus=32",
        "++ray_kwargs.ray_init.include_dashboard=false",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]
    if context.device == "cuda":
        found.append(f"actor_rollout_ref.weight_sync_timeout={WEIGHT_SYNC_SECONDS}")
    if context.device == "cuda" and find_spec("flash_attn") is None:
        for model in ("actor_rollout_ref.model", "critic.model"):
            found += [f"++{model}.override_config.attn_implementation=sdpa", f"++{model}.use_remove_padding=false"]
    return found


def make_rows(folder: Path) -> Path:
    """A folder with train.parquet and test.parquet of a few prompts, made if it is not there."""
    import pandas as pd

    path = folder / "data"
    if not (path / "without_tool.parquet").is_file():
        path.mkdir(parents=True, exist_ok=True)
        rows = [
            {
                "data_source": "gpu_smoke",
                "prompt": [{"role": "user", "content": prompt.strip()}],
                "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": "none"},
                "extra_info": {"split": "train", "index": index},
                "agent_name": "verltool_agent",
            }
            for index, prompt in enumerate(tiny_models.PROMPTS * 2)
        ]
        for name in ("train", "test", "without_tool"):
            pd.DataFrame(rows).to_parquet(path / f"{name}.parquet")
    return path


def _finite(metrics: dict[str, Any], name: str) -> float:
    value = float(metrics.get(name, math.nan))
    if not math.isfinite(value):
        raise PartFailed(f"{name} is {value}")
    return value


def last_words(*logs: Path) -> str:
    """Why a training ended: its own last line about it, else the last error that anything printed."""
    lines = [line.strip() for log in logs if log.is_file() for line in log.read_text(errors="replace").splitlines()]
    reasons = [line for line in lines if line.startswith("error: ")]
    errors = [line for line in lines if "Error" in line and "ray.exceptions" not in line]
    return (reasons or errors or lines or ["it printed nothing"])[-1][-300:]
