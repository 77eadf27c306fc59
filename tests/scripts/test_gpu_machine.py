"""What scripts/env.sh checks of a machine before it downloads the GPU stack, and where flash-attn comes from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPUS = (
    'case "$*" in *-L*) echo "GPU 0: a card"; echo "GPU 1: a card";; *driver*) echo {driver};; '
    "*) printf '%s\\n' {capabilities};; esac"
)
FINE = {
    "nvidia-smi": GPUS.format(driver="580.65.06", capabilities="9.0 9.0"),
    "nproc": "echo 32",
    "df": 'echo header; case "$*" in *shm*) echo "tmpfs 67108864 0 67108864 0% /dev/shm";; '
    '*) echo "disk 999999999 0 99999999 0% /";; esac',
    "gcc": "true",
    "unshare": "true",
    "uv": "true",
}


def run(folder: Path, commands: dict[str, str], script: str, **variables: str) -> subprocess.CompletedProcess:
    """Run `script` behind env.sh and gpu_machine.sh, with programs of the machine replaced."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, body in commands.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder), "VERL_TOOL_VENV": str(folder / "venv")}
    environment |= {"VERL_TOOL_SKIP_INSTALL": "1", "VERL_TOOL_SKIP_SYSTEM": "1", **variables}
    sourced = f"set -euo pipefail; source {ROOT}/scripts/env.sh gpu; source {ROOT}/scripts/gpu_machine.sh; {script}"
    return subprocess.run(["bash", "-c", sourced], env=environment, capture_output=True, text=True, timeout=60)


def check(folder: Path, python: str = sys.executable, **commands: str) -> subprocess.CompletedProcess:
    return run(
        folder, FINE | {k.replace("_", "-"): v for k, v in commands.items()}, f"verl_tool_check_gpu_machine {python}"
    )


def test_a_good_machine_passes_in_silence(tmp_path):
    done = check(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


PROBLEMS = {
    "driver": (
        {"nvidia_smi": GPUS.format(driver="570.133.20", capabilities="9.0")},
        ("driver is 570.133.20", "580 or later", "update the driver"),
    ),
    "one old card of two": (
        {"nvidia_smi": GPUS.format(driver="580.65.06", capabilities="9.0 7.0")},
        ("compute capability 7.0", "7.5 and later"),
    ),
    "disk": ({"df": 'echo header; echo "disk 9 0 5242880 0% /"'}, ("has 5 GiB free", "need 12", "UV_CACHE_DIR")),
}


@pytest.mark.parametrize(("commands", "words"), PROBLEMS.values(), ids=list(PROBLEMS))
def test_fatal_problems_are_reported_before_the_download(tmp_path, commands, words):
    done = check(tmp_path, **commands)
    assert done.returncode != 0
    for word in (*words, "nothing was installed", "VERL_TOOL_SKIP_CHECKS=1"):
        assert word in done.stderr


def test_a_python_without_headers_is_reported(tmp_path):
    """Triton compiles against them."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/bash\necho "3.11 /nonexistent/Python.h"\n')
    python.chmod(0o755)
    done = check(tmp_path, python=str(python))
    assert done.returncode != 0
    assert "no python3.11-dev" in done.stderr
    assert "apt-get install python3.11-dev" in done.stderr


WARNINGS = {
    "cpus": ({"nproc": "echo 4"}, ("4 CPUs for 2 GPUs", "8 or more")),
    "shared memory": (
        {"df": 'echo header; case "$*" in *shm*) echo "shm 65536 0 1 0% /";; *) echo "d 9 0 99999999 0% /";; esac'},
        ("/dev/shm has 0 GiB", "--shm-size"),
    ),
    "namespaces": ({"unshare": "false"}, ("no namespaces", "ISOLATION=none")),
    "no GPU": ({"nvidia_smi": "echo NVIDIA-SMI has failed; exit 9"}, ("finds no GPU: NVIDIA-SMI has failed",)),
}


@pytest.mark.parametrize(("commands", "words"), WARNINGS.values(), ids=list(WARNINGS))
def test_what_may_be_meant_is_a_warning(tmp_path, commands, words):
    done = check(tmp_path, **commands)
    assert done.returncode == 0
    for word in words:
        assert word in done.stderr


def test_a_failed_check_can_be_overruled(tmp_path):
    commands = FINE | {"df": PROBLEMS["disk"][0]["df"]}
    done = run(tmp_path, commands, f"verl_tool_check_gpu_machine {sys.executable}", VERL_TOOL_SKIP_CHECKS="1")
    assert done.returncode == 0
    assert "has 5 GiB free" in done.stderr


@pytest.mark.parametrize(
    ("profile", "gpu", "folder"),
    [("", False, ".venv"), ("", True, ".venv-gpu"), ("gpu", False, ".venv-gpu"), ("cpu", True, ".venv"),
     ("megatron_moe", False, ".venv-gpu")],
)  # fmt: skip
def test_each_stack_has_an_environment_of_its_own(tmp_path, profile, gpu, folder):
    """On a head node without a GPU, PROFILE=gpu takes the stack of the nodes that have them."""
    commands = {"nvidia-smi": FINE["nvidia-smi"] if gpu else "exit 9"}
    script = f"source {ROOT}/scripts/env.sh train; echo $verl_tool_venv"
    done = run(tmp_path, commands, script, VERL_TOOL_VENV="", **({"PROFILE": profile} if profile else {}))
    assert done.stdout.strip() == str(ROOT / folder)


def test_a_cpu_build_of_torch_is_not_offered_to_the_gpu_stack(tmp_path):
    for name in ("both", "cuda"):
        (tmp_path / name).mkdir()
    (tmp_path / "both" / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    folders = f"{tmp_path}/both,{tmp_path}/cuda"
    done = run(tmp_path, {}, "verl_tool_wheel_folders gpu; echo; verl_tool_wheel_folders cpu", UV_FIND_LINKS=folders)
    assert done.stdout.split("\n\n") == [f"{tmp_path}/cuda", f"{tmp_path}/both\n{tmp_path}/cuda\n"]


UV = 'echo "uv $*"; case "$*" in *NOT_THERE*) exit 2;; esac'


@pytest.mark.parametrize(
    ("variables", "imports", "code", "words"),
    [
        ({}, False, 0, ("without flash-attn", "FLASH_ATTN_WHEEL")),
        ({}, True, 0, ()),
        ({"FLASH_ATTN_WHEEL": "some.whl"}, True, 0, ("installing some.whl",)),
        ({"FLASH_ATTN_WHEEL": "some.whl"}, False, 1, ("removed again", "torch 2.13")),
        ({"FLASH_ATTN_WHEEL": "NOT_THERE.whl"}, False, 1, ("could not be installed",)),
        ({"FLASH_ATTN_BUILD": "1"}, False, 1, ("needs nvcc",)),
    ],
)
def test_flash_attention_is_a_phase_of_its_own(tmp_path, variables, imports, code, words):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/bash\nexit {0 if imports else 1}\n")
    python.chmod(0o755)
    done = run(tmp_path, {"uv": UV}, f"verl_tool_flash_attention {tmp_path}/programs/uv", **variables)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr
    assert words or not done.stderr


def test_flash_attention_is_built_on_request(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    os.symlink("/bin/true", python)
    commands = {"uv": UV, "nvcc": "echo release 13.0"}
    done = run(tmp_path, commands, f"verl_tool_flash_attention {tmp_path}/programs/uv", FLASH_ATTN_BUILD="1")
    assert done.returncode == 0, done.stderr
    assert "--no-build-isolation flash-attn" in done.stdout


def test_further_extras_go_into_the_environment_that_is_active(tmp_path):
    script = f"VIRTUAL_ENV={ROOT}/.venv-gpu; source {ROOT}/scripts/env.sh web; echo $verl_tool_venv"
    assert run(tmp_path, {}, script, VERL_TOOL_VENV="").stdout.strip() == f"{ROOT}/.venv-gpu"
    script = f"VIRTUAL_ENV={ROOT}/.venv-gpu; source {ROOT}/scripts/env.sh web cpu; echo $verl_tool_venv"
    assert run(tmp_path, {}, script, VERL_TOOL_VENV="").stdout.strip() == f"{ROOT}/.venv"


def test_a_folder_that_is_yet_to_be_made_is_looked_at(tmp_path):
    done = run(
        tmp_path, FINE, f"verl_tool_check_gpu_machine {sys.executable}", VERL_TOOL_VENV=f"{tmp_path}/no/such/venv"
    )
    assert (done.returncode, done.stderr) == (0, "")
