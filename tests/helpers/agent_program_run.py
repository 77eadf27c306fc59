"""A run with an agent program that computes for the model, and settings with which it trains on two cores."""

from __future__ import annotations

from pathlib import Path

from calculator_run import AGENT

from verl_tool.gateway.agent_host import PROGRAM

PROGRAM_TEXT = '''
"""Asks a model, computes what it wants computed, asks again, and writes its answer down."""
import json, os, re, sys, urllib.request

def ask(messages):
    body = {"model": "any", "messages": messages, "stop": ["<call>"]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

messages = [{"role": "user", "content": sys.argv[1]}]
text = ask(messages)
found = re.search(r"([0-9]+(?:[.][0-9]+)?)([-+*/])([0-9]+(?:[.][0-9]+)?)$", text)
if found:
    a, b = float(found[1]), float(found[3])
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0}[found[2]]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{result:g}"}]
    text = ask(messages)
open("answer.txt", "w").write(text)
'''


def prepare(folder: Path) -> tuple[str, ...]:
    """Write the program and its reward manager into `folder`, which others may read. Returns the run's options."""
    folder.chmod(0o755)
    program = folder / "agent.py"
    program.write_text(PROGRAM_TEXT)
    program.chmod(0o644)
    manager = folder / "lengths.py"
    manager.write_text(
        "from verl_tool.agent_workers.reward_manager.base import GradingRewardManager\n"
        "from verl_tool.agent_workers.reward_manager.grade import Grade\n\n\n"
        "class Lengths(GradingRewardManager):\n"
        "    async def grade(self, sample):\n"
        f"        written = sample.trajectory.extra['{PROGRAM}']['files'].get('answer.txt', '')\n"
        "        return Grade(len(written) % 3 / 2, bool(written))\n"
    )
    return (
        *("trainer.use_v1=true", "algorithm.adv_estimator=grpo", "trainer.val_before_train=false"),
        *(f"gateway.program.command=[python,{program},'{{task}}']", f"gateway.program.readable=[{program}]"),
        *("gateway.program.keep_files=[answer.txt]", "gateway.session.max_tokens=24", f"{AGENT}.enable_agent=false"),
        *("tool_server.start=null", "token_records_every=1", "trainer.save_freq=-1", "trainer.test_freq=2"),
        *("reward.reward_manager.source=importlib", "reward.reward_manager.name=Lengths"),
        f"reward.reward_manager.module.path={manager}",
    )
