"""``python -m verl_tool.servers.tests.test_piston_tool piston --url=http://localhost:5000/get_observation``"""

import json

from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, command_line, one_by_one
from verl_tool.servers.tests.remote_cases import remote_cases

_ELEMENTS = "<language>python</language>\n<version>*</version>\n<args>arg1 arg2</args>\n<stdin>line</stdin>"
_HELLO = "import sys\nprint('Hello', sys.argv[1:], input())"
_FILES = [
    {"name": "main.py", "content": "import helper\nprint(helper.add(40, 2))"},
    {"name": "helper.py", "content": "def add(a, b):\n    return a + b"},
]
_OWN_FORMS = one_by_one(
    LiveTurn(
        f'<piston>\n{_ELEMENTS}\n<file name="main.py">\n{_HELLO}\n</file>\n</piston>',
        ("Hello ['arg1', 'arg2'] line",),
    ),
    LiveTurn(f"<piston>{json.dumps({'language': 'python', 'files': _FILES})}</piston>", ("42",)),
)

CASES = (*remote_cases("piston"), LiveCase("files and arguments in Piston's own forms", _OWN_FORMS))

app = command_line(__name__, "piston", "piston", CASES)
