"""``python -m verl_tool.servers.tests.test_sandbox_fusion_tool sandbox_fusion --url=http://localhost:5000/get_observation``"""

from verl_tool.servers.tests.live_check import command_line
from verl_tool.servers.tests.remote_cases import remote_cases

CASES = remote_cases("sandbox_fusion")

app = command_line(__name__, "sandbox_fusion", "sandbox_fusion", CASES)
