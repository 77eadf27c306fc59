"""Run the agent of ``examples/harbor`` as Harbor makes it, in an environment that runs commands on this machine. Prints
what it left as JSON. Run with an interpreter that has Harbor, with ``examples/harbor`` in PYTHONPATH.

python harbor_agent_run.py ENDPOINT LOGS
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from harbor.agents.factory import AgentFactory
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.trial.config import AgentConfig
from harbor.utils.trajectory_validator import TrajectoryValidator


class LocalEnvironment:
    """The part of Harbor's environments that the agent uses."""

    async def exec(self, command: str, timeout_sec: int | None = None) -> Any:
        """Run a command on this machine."""
        process = await asyncio.create_subprocess_shell(command, stdout=-1, stderr=-1)
        stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=stdout.decode(), stderr=stderr.decode(), return_code=process.returncode)


async def main(endpoint: str, logs: Path) -> None:
    """Let the agent work on a task."""
    config = AgentConfig(
        name="verl_tool_agent:VerlToolAgent", model_name="toy", kwargs={"endpoint": endpoint, "max_turns": 4}
    )
    AgentFactory.run_preflight(config)
    agent = AgentFactory.create_agent_from_config(config, logs_dir=logs)
    environment, context = LocalEnvironment(), AgentContext()
    await agent.setup(environment)
    await agent.run("How warm is it?", environment, context)
    validator = TrajectoryValidator()
    validator.validate(logs / "trajectory.json")
    info = agent.to_agent_info().model_dump()
    print(json.dumps({"errors": validator.errors, "info": info, "context": context.model_dump()}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
