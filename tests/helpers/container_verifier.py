"""A verifier of containers for tests of tasks: the workspace is copied into a second container of the image.

`in_workspace` runs its commands in the verifier's own container here. So this shows that a task's verifier is right,
and not that code of the workspace cannot reach its reward.
"""

from __future__ import annotations

from dataclasses import replace

from verl_tool.content.packed_files import unpack
from verl_tool.sandbox.backends import Container
from verl_tool.sandbox.backends.image_builder import ImageBuilder
from verl_tool.servers.tools.workspace import verifier
from verl_tool.servers.tools.workspace.layout import lay_out
from verl_tool.verification import Verdict, Verification

_HELPER_FOLDER, _COPY = "/logs/lib", "/tmp/workspace.tar.gz"
_LOCAL_REQUEST = """

import pathlib, subprocess
def _request(request, seconds):
    asked = json.loads(request)
    for path, content in asked["files"].items():
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).write_bytes(_decode(content))
    command = asked["command"] if isinstance(asked["command"], list) else ["bash", "-c", asked["command"]]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | asked["env"]
    try:
        options = {"cwd": asked["cwd"], "env": env, "timeout": asked["seconds"], "capture_output": True}
        ran = subprocess.run(command, input=_decode(asked["stdin"]), **options)
        code, limit, out, err = ran.returncode, None, ran.stdout, ran.stderr
    except subprocess.TimeoutExpired:
        code, limit, out, err = None, "wall_seconds", b"", b""
    files = {path: _encode(pathlib.Path(path).read_bytes()) for path in asked["read"]}
    return {"exit_code": code, "limit_hit": limit, "stdout": _encode(out), "stderr": _encode(err), "truncated": False,
            "files": files}
"""


async def verify_container(container: Container, verification: Verification) -> Verdict:
    """Stand in for `workspace.verifier.verify`."""
    settings = container._settings
    workdir = await ImageBuilder(settings.command).workdir(settings.image)
    packed = await container.exec(["tar", "-C", workdir, "-czf", _COPY, "."], cwd="/")
    assert packed.ok, packed.stderr
    copy = await container.read_file(_COPY)
    async with Container(replace(settings, folders=("/tests", "/logs")), container.limits) as own:
        script = 'cd -- "$1" && find . -mindepth 1 -delete && exec tar -xzpf - --no-same-owner'
        filled = await own.exec(["bash", "-c", script, "bash", workdir], stdin=copy, cwd="/")
        assert filled.ok, filled.stderr
        await own.exec(["mkdir", "-p", verifier.LOGS, _HELPER_FOLDER], cwd="/")
        await lay_out(own, unpack(verification.files), verifier.TESTS)
        await own.write_file(f"{_HELPER_FOLDER}/in_workspace.py", verifier._helper() + _LOCAL_REQUEST.encode())
        env = {"PYTHONPATH": f"{_HELPER_FOLDER}:{verifier.TESTS}", "PYTHONSAFEPATH": "1", "HOME": "/logs"}
        result = await own.exec(
            ["bash", f"{verifier.TESTS}/test.sh"],
            wall_seconds=verification.timeout_seconds,
            env={**env, **verification.env},
            cwd=workdir,
        )
        reward, why, numbers = await verifier.read_reward(own, result, verification)
        return Verdict(reward, f"{why}\n{result.output}", numbers)
