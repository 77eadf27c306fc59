"""``python -m verl_tool.servers.tests.test_piston_tool piston --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

import json

from verl_tool.servers.tests.live_check import LiveCase, Probe, command_line
from verl_tool.servers.tests.remote_cases import REMOTE_CASES

_HELLO = "import sys\nprint('Hello', sys.argv[1:], input())"


async def _own_forms(probe: Probe) -> None:
    """As verl-tool's own check writes them."""
    elements = "<language>python</language>\n<version>*</version>\n<args>arg1 arg2</args>\n<stdin>line</stdin>"
    action = f'<piston>\n{elements}\n<file name="main.py">\n{_HELLO}\n</file>\n</piston>'
    await probe.expect(action, "Hello ['arg1', 'arg2'] line")
    files = [{"name": "main.py", "content": "import helper\nprint(helper.add(40, 2))"}]
    files.append({"name": "helper.py", "content": "def add(a, b):\n    return a + b"})
    await probe.expect(f"<piston>{json.dumps({'language': 'python', 'files': files})}</piston>", "42")


CASES = (*REMOTE_CASES, LiveCase("files and arguments in Piston's own forms", _own_forms))

app = command_line("piston", "piston", CASES, "Check piston of a live server, case by case.")

if __name__ == "__main__":
    app()
