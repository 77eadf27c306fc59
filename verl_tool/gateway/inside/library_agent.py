"""An agent of a Python library that has a shell: ``python library_agent.py openai_agents|smolagents TASK``.

It runs in an environment of its own, without verl_tool, and finds the model by ``OPENAI_BASE_URL`` and
``OPENAI_API_KEY``.
"""

import os
import subprocess
import sys

_MAX_STEPS = 1000
"""The session has a limit of its own."""
_COMMAND_SECONDS = 300
_MAX_CHARACTERS = 20_000


def bash(command: str) -> str:
    """Run a shell command in the working directory and return what it prints.

    Args:
        command: The command.
    """
    try:
        done = subprocess.run(
            ["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"The command was stopped after {_COMMAND_SECONDS} seconds."
    output = (done.stdout + done.stderr).decode("utf-8", "replace")
    if len(output) > _MAX_CHARACTERS:
        output = f"{output[: _MAX_CHARACTERS // 2]}\n[...]\n{output[-_MAX_CHARACTERS // 2 :]}"
    return output if done.returncode == 0 else f"{output}\nexit status {done.returncode}"


def run_openai_agents(task: str) -> object:
    """Run an agent of OpenAI's Agents SDK until it answers without a call."""
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)  # traces go to OpenAI
    instructions = "Solve the task with the tool bash. Answer when it is solved."
    agent = Agent(name="agent", instructions=instructions, model="model", tools=[function_tool(bash)])
    return Runner.run_sync(agent, task, max_turns=_MAX_STEPS).final_output


def run_smolagents(task: str) -> object:
    """Run a tool-calling agent of smolagents until it calls its tool ``final_answer``."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    env = os.environ
    model = OpenAIServerModel("model", api_base=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"])
    return ToolCallingAgent(tools=[tool(bash)], model=model, max_steps=_MAX_STEPS).run(task)


if __name__ == "__main__":
    library, prompt = sys.argv[1:]
    print({"openai_agents": run_openai_agents, "smolagents": run_smolagents}[library](prompt))
