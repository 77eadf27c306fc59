"""Whether the installed packages are those that our replacements in them are written for, before a training.

``python -m verl_tool.trainer.preflight.patch_check`` imports all modules in which something is replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from packaging.specifiers import SpecifierSet

from verl_tool.errors import ConfigError
from verl_tool.platforms.patch import Internal, check_patches

IMPORT_SECONDS = 300.0
"""The modules have this long to be imported."""
_RAY = (
    Internal(
        "ray",
        SpecifierSet(">=2.60,<2.61"),
        "ray._private.ray_constants",
        "SETUP_WORKER_FILENAME",
        why="workers are forked from a process that has imported what they need",
    ),
)


def internals() -> tuple[Internal, ...]:
    """All that a training replaces in other packages here. Imports verl, and not vLLM. Raises ConfigError."""
    try:
        from verl_tool.agent_workers import rollout_weights
        from verl_tool.agent_workers.no_engine import ROLLOUTS
        from verl_tool.agent_workers.reward_manager.registry import LOOK_UP
        from verl_tool.platforms import cpu, vllm_plugin
        from verl_tool.platforms.verl_patches import WITHOUT_ACCELERATOR
        from verl_tool.trainer import task_runner
        from verl_tool.trainer.ppo import ray_trainer, v1_trainer
        from verl_tool.trainer.preflight.ray_resources import PLACEMENT_GROUP
    except ImportError as error:
        raise ConfigError(f"an installed package lacks what verl-tool extends in it: {error}") from error
    platform = (*WITHOUT_ACCELERATOR, *_RAY) if cpu.trains_on_cpu() else ()
    trainers = (task_runner.TRAINER, *ray_trainer.PATCHES, ray_trainer.TRACKING, *v1_trainer.PATCHES, v1_trainer.IDS)
    weights = rollout_weights.PATCHES
    return (*cpu.EVERYWHERE, *platform, LOOK_UP, ROLLOUTS, PLACEMENT_GROUP, *weights, *trainers, *vllm_plugin.PATCHES)


def check_versions() -> None:
    """Raises ConfigError that names each package of another version, and each symbol that is gone, with the remedy."""
    try:
        check_patches(internals())
    except ImportError as error:
        raise ConfigError(str(error)) from error


@contextlib.contextmanager
def imports_checked() -> Iterator[Callable[[], None]]:
    """Import the modules in a process of their own while the block runs.

    The function that this gives waits for them, and raises ConfigError if one cannot be imported.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )

        def wait() -> None:
            try:
                code = process.wait(IMPORT_SECONDS)
            except subprocess.TimeoutExpired:
                raise ConfigError(f"the modules of verl and vLLM were not imported in {IMPORT_SECONDS:g} s") from None
            if code:
                output.seek(0)
                last = output.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise ConfigError(f"`python -m {__name__}` ended with exit code {code}, run it to see why: {last}")

        try:
            yield wait
        finally:
            process.kill()
            process.wait()


def main() -> None:
    """Import each module, replacements in force. Raises ImportError."""
    from verl_tool.platforms import vllm_plugin

    vllm_plugin.register()
    for module in dict.fromkeys(each.module for each in internals() if each.is_installed()):
        importlib.import_module(module)


if __name__ == "__main__":
    main()
