"""Plays an example of an environment whose package has a loop of its own, and reports the package's score.

    python environment_program.py verifiers|inspect
    python environment_program.py verifiers|inspect NAME ARGUMENTS LIMIT

The first plays the example in ENVIRONMENT, a JSON object with ``name``, ``index``, ``id``, and perhaps ``arguments``
and ``score``. The second prints the first examples as JSON lines.

It runs in an environment of its own, without verl_tool. The model is at OPENAI_BASE_URL with OPENAI_API_KEY.
"""

import asyncio
import ctypes
import hashlib
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

VERDICT_VARIABLE = "VERL_TOOL_VERDICT_FD"
MISCONFIGURED = "misconfigured"
"""In place of a reward: what to correct, as no policy can cause it."""
_MAX_METRICS, _MAX_NAME = 60, 80
_MAX_RETRIES = 2
"""Of a request to the model."""
_SET_DUMPABLE = 4

_NO_GRADER = (
    "the task asks a model with the role grader, and the policy is the only model; use a task whose scorer asks none"
)
Metrics = dict[str, float]


class MissingGraderError(Exception):
    """The task needs a second model, which no policy can change."""


def take_channel() -> int:
    """Take the descriptor for the verdict away from what this process starts: children do not inherit it, and, as this
    process is not dumpable, cannot open or change anything of it through /proc or ptrace."""
    channel = int(os.environ.pop(VERDICT_VARIABLE))
    os.set_inheritable(channel, False)
    os.register_at_fork(after_in_child=lambda: os.close(channel))
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
    return channel


def choose_reward(scores: Metrics, name: str | None) -> float:
    """Return the score that is the reward: the one named, or the only one. Raises ValueError."""
    if name is None and len(scores) == 1:
        return next(iter(scores.values()))
    if name not in scores:
        raise ValueError(f"score={name!r} of the row's environment is not one of the scores: {', '.join(scores)}")
    return scores[name]


def load_inspect_task(name: str, arguments: dict[str, Any]) -> Any:
    """Return one task: of a file (``FILE.py@task``) or a package (``package/task``). Raises ValueError."""
    from inspect_ai._eval.loader import load_tasks  # no public function does

    tasks = load_tasks([name], arguments)
    if len(tasks) != 1:
        raise ValueError(f"{name} is {len(tasks)} tasks; name one, as FILE.py@task or package/task")
    return tasks[0]


def list_inspect(name: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages and the id of each sample."""
    for sample in load_inspect_task(name, arguments).dataset:
        yield {"messages": sample_messages(sample), "id": identify(sample)}


def sample_messages(sample: Any) -> list[dict[str, str]]:
    """Return the messages that a sample of inspect begins with."""
    if isinstance(sample.input, str):
        return [{"role": "user", "content": sample.input}]
    return [{"role": each.role, "content": each.text} for each in sample.input]


def identify(sample: Any) -> int | str:
    """Return the id of a sample, or a hash of its messages if it has none."""
    if sample.id is not None:
        return sample.id
    return hashlib.sha256(json.dumps(sample_messages(sample)).encode()).hexdigest()[:16]


def absent_grader(requests: list[str]) -> Any:
    """Return a model of inspect that adds a text to `requests` and fails whenever it is asked."""
    from inspect_ai.model import ModelAPI, get_model, modelapi

    @modelapi("absent")
    class AbsentModel(ModelAPI):
        async def generate(self, *_: Any, **__: Any) -> Any:
            requests.append(_NO_GRADER)
            raise MissingGraderError(_NO_GRADER)

    return get_model("absent/grader")


def play_inspect(example: dict[str, Any]) -> tuple[float, Metrics]:
    """Solve and score one sample. Raises RuntimeError if there is no score, with what inspect says, and
    MissingGraderError if a grader was asked."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model
    from inspect_ai.scorer import value_to_float

    env = os.environ
    task = load_inspect_task(example["name"], example.get("arguments", {}))
    index, identity = example["index"], example.get("id")
    if not 0 <= index < len(task.dataset) or identify(task.dataset[index]) != identity:
        raise ValueError(f"sample {index} of {example['name']} does not have the id {identity!r}; make the rows again")
    model = get_model("openai-api/gateway/model", base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"])
    requests: list[str] = []
    (log,) = evaluate(
        task,
        model=model,
        model_roles={"grader": absent_grader(requests)},  # else the policy grades itself
        limit=(index, index + 1),
        epochs=1,
        max_retries=_MAX_RETRIES,
        display="none",
        log_dir="memory://logs",  # what the model's code can write to would be read again
        log_realtime=False,
        ctl_server=False,
    )
    if requests:
        raise MissingGraderError(_NO_GRADER)
    (sample,) = log.samples or [None]
    error = log.error or (sample.error if sample else None)
    if error is not None or not sample.scores:
        raise RuntimeError(error.message if error else "the task has no scorer")
    to_float = value_to_float()
    scores = {}
    for name, score in sample.scores.items():
        values = score.value if isinstance(score.value, dict) else {"": score.value}
        scores.update({f"{name}/{key}" if key else name: to_float(value) for key, value in values.items()})
    return choose_reward(scores, example.get("score")), scores


def load_verifiers(name: str, arguments: dict[str, Any]) -> Any:
    """Return the environment of a taskset; `arguments` are its config. Raises ValueError for one with several agents,
    since the policy would play them all."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    config = resolve_env_config({**arguments, "taskset": {**arguments.get("taskset", {}), "id": name}})
    agents = agent_config_fields(config)
    if len(agents) != 1:
        raise ValueError(f"{name} has the agents {', '.join(agents)}; an environment with one agent can be played")
    ((role, agent),) = agents.items()
    here = agent.model_copy(update={"runtime": SubprocessConfig()})  # others are elsewhere, or need an engine
    return load_environment(config.model_copy(update={role: here}))


def list_verifiers(name: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages and the key of each task. An infinite taskset has no end."""
    from verifiers.v1.types import content_text

    for task in load_verifiers(name, arguments).taskset:
        prompt = task.data.prompt
        messages = [{"role": "user", "content": task.data.prompt_text}]
        if isinstance(prompt, list):
            messages = [{"role": each.role, "content": content_text(each.content)} for each in prompt]
        system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
        yield {"messages": system + messages, "id": task.key}


def play_verifiers(example: dict[str, Any]) -> tuple[float, Metrics]:
    """Play and score one task. Raises RuntimeError with what verifiers says, if it failed."""
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig

    environment = load_verifiers(example["name"], example.get("arguments", {}))
    index, identity = example["index"], example.get("id")
    (task,) = environment.taskset.include(idx=[index])
    if task.key != identity:
        raise ValueError(f"task {index} of {example['name']} does not have the key {identity!r}; make the rows again")
    if task.plugged_judges():
        raise ValueError(f"{example['name']} has judges, and the policy is the only model that they could ask")
    replace_uv()
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")

    async def play() -> Any:
        async with environment.serving():
            return await environment.run_episode(task, ModelContext(model="model", client=client))

    episode = asyncio.run(play())
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or len(episode.traces) != 1:
        what = f"{errors[-1].type}: {errors[-1].message}" if errors else f"{len(episode.traces)} traces"
        raise RuntimeError(f"the episode was not completed: {what}")
    (trace,) = episode.traces
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return trace.reward, {**metrics, **scores}


def replace_uv() -> None:
    """Let programs of verifiers that uv would install packages for run with those of this environment: there is no
    network. (`Runtime.prepare_uv_script` finds it on PATH first.)"""
    folder = os.path.expanduser("~/.local/bin")
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/uv", "w") as file:
        file.write(f"""#!/bin/sh
case "$*" in *--help*) echo --script;; "python find"*) echo {shlex.quote(sys.executable)};; esac
""")
    os.chmod(f"{folder}/uv", 0o755)


def write_verdict(channel: int, reward: float, metrics: Metrics) -> None:
    """Write the reward and the first metrics, those that are finite numbers."""
    finite = [(name[:_MAX_NAME], value) for name, value in metrics.items() if math.isfinite(value) and name != "reward"]
    os.write(channel, json.dumps({"reward": reward, **dict(finite[:_MAX_METRICS])}).encode())


LIST = {"inspect": list_inspect, "verifiers": list_verifiers}
PLAY = {"inspect": play_inspect, "verifiers": play_verifiers}


def main() -> None:
    """Play an example, or list all."""
    package, *names = sys.argv[1:]
    if names:
        name, arguments, limit = names
        for example in islice(LIST[package](name, json.loads(arguments)), int(limit)):
            print(json.dumps(example))
        return
    channel = take_channel()
    try:
        write_verdict(channel, *PLAY[package](json.loads(os.environ.pop("ENVIRONMENT"))))
    except MissingGraderError as error:
        os.write(channel, json.dumps({MISCONFIGURED: str(error)}).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the package may have left threads that run


if __name__ == "__main__":
    main()
