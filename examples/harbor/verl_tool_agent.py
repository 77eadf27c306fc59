"""A Harbor agent whose model is served by verl-tool's eval endpoint.

    python -m eval_service.app --from_run outputs/terminal/gpu
    PYTHONPATH=examples/harbor harbor run -p examples/tasks -a verl_tool_agent:VerlToolAgent

The agent runs on Harbor's machine, in a session of the endpoint, with one tool: ``bash``, whose commands run in the
environment of the trial. It needs Harbor 0.26 and nothing of verl-tool. Its options, each ``--ak NAME=VALUE``, are the
arguments of `VerlToolAgent`; the API key of the endpoint is read from ``VERL_TOOL_EVAL_API_KEY``.

The folder ``agent`` of a trial gets ``trajectory.json`` (ATIF 1.8), and ``record.jsonl`` with the record that training
uses, which ``python -m verl_tool.viewer`` opens.
"""

import json
import shlex
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

import httpx
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from openai import AsyncOpenAI, BadRequestError

Json = dict[str, Any]
VERSION = "1"
API_KEY = "VERL_TOOL_EVAL_API_KEY"
BASH: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a new shell of the task's machine. Returns its output and, if it is not 0, "
        "its exit code. Call no tool when the task is done.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
_GRACE_SECONDS = 30
"""Time for Harbor to start a command and to fetch its output, in addition to the command's own limit."""
_SESSION_SECONDS = 30.0
_MAX_RETRIES = 5


class VerlToolAgent(BaseAgent):
    """Ask the model, run its commands, and stop when it calls no tool or a limit is reached."""

    capabilities = AgentCapabilities(atif=True)

    def __init__(
        self,
        *args: Any,
        endpoint: str = "http://127.0.0.1:8000",
        max_turns: int = 50,
        command_seconds: int = 120,
        answer_seconds: int = 600,
        max_output_characters: int = 20_000,
        session: Json | None = None,
        **kwargs: Any,
    ) -> None:
        """`endpoint` is the address of the eval endpoint, `answer_seconds` the limit of one answer of the model, and
        `session` has other options of the session, such as ``{"sampling": {"temperature": 0.6}}``."""
        super().__init__(*args, **kwargs)
        self.endpoint = endpoint.rstrip("/").removesuffix("/v1")
        self.max_turns, self.command_seconds = int(max_turns), int(command_seconds)
        self.answer_seconds, self.max_output = int(answer_seconds), int(max_output_characters)
        self.session: Json = {"max_turns": self.max_turns, "answer_seconds": self.answer_seconds} | (session or {})
        self._served_model = self.model_name

    @staticmethod
    def name() -> str:
        """Return the name of the agent."""
        return "verl-tool"

    def version(self) -> str:
        """Return the version of this file."""
        return VERSION

    async def setup(self, environment: BaseEnvironment) -> None:
        """Learn the name of the model. Raises RuntimeError if the endpoint does not answer."""
        async with self._client(self.endpoint) as http:
            models = await _answer_of(http.get("/v1/models"), self.endpoint)
        self._served_model = self.model_name or models["data"][0]["id"]

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Work on the task, and write trajectory and record, also when Harbor ends it early."""
        async with self._client(self.endpoint) as http:
            opened = await _answer_of(http.post("/sessions", json=self.session), self.endpoint)
        url = _with_port(self.endpoint, opened["port"])
        steps: list[Json] = [{"step_id": 1, "timestamp": _now(), "source": "user", "message": instruction}]
        stop = "interrupted"
        try:
            base_url = url + opened["paths"]["openai"]
            # The deadline is the session's; the wait in the endpoint's queue comes in addition.
            limits = {"max_retries": _MAX_RETRIES, "timeout": 2.0 * self.answer_seconds}
            async with AsyncOpenAI(base_url=base_url, api_key=opened["key"], **limits) as model:
                stop = await self._converse(model, environment, steps)
        finally:
            record = None
            try:
                async with self._client(url) as http:
                    finished = await _answer_of(http.post(f"/sessions/{opened['id']}/finish", json={}), url)
                record = finished["trajectory"]
            finally:
                self._save(opened["id"], steps, record, stop, context)

    async def _converse(self, model: AsyncOpenAI, environment: BaseEnvironment, steps: list[Json]) -> str:
        """Append a step for each answer of the model. Returns why the conversation ended."""
        messages: list[Any] = [{"role": "user", "content": steps[0]["message"]}]
        for _ in range(self.max_turns):
            try:
                answer = await model.chat.completions.create(
                    model=self._served_model or "", messages=messages, tools=[BASH]
                )
            except BadRequestError as error:
                if "context_length_exceeded" not in str(error):
                    raise
                return "context_length"
            message = answer.choices[0].message.model_dump(exclude_none=True)
            step: Json = {
                "step_id": len(steps) + 1,
                "timestamp": _now(),
                "source": "agent",
                "message": message.get("content") or "",
            }
            if message.get("reasoning_content"):
                step["reasoning_content"] = message["reasoning_content"]
            if answer.usage is not None:
                used = answer.usage
                step["metrics"] = {"prompt_tokens": used.prompt_tokens, "completion_tokens": used.completion_tokens}
            steps.append(step)
            calls = message.get("tool_calls") or []
            if not calls:
                return "answered" if answer.choices[0].finish_reason == "stop" else "length"
            messages.append(message)
            step["tool_calls"], step["observation"] = [_tool_call(call) for call in calls], {"results": []}
            for call in calls:
                output = await self._run_command(call["function"], environment)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
                step["observation"]["results"].append({"source_call_id": call["id"], "content": output})
        return "max_turns"

    async def _run_command(self, function: Json, environment: BaseEnvironment) -> str:
        """Run a call of the model. What the model does wrong is its observation; what Harbor does wrong is raised."""
        arguments = _parse_arguments(function["arguments"])
        command = arguments.get("command")
        if function["name"] != "bash" or not isinstance(command, str):
            return 'Error: call the tool "bash" with a JSON object whose "command" is a string.'
        limited = f"timeout -k 5 {self.command_seconds} bash -c {shlex.quote(command)}"
        ran = await environment.exec(limited, timeout_sec=self.command_seconds + _GRACE_SECONDS)
        # Some of Harbor's environments run commands in a terminal.
        text = ((ran.stdout or "") + (ran.stderr or "")).replace("\r\n", "\n")
        if len(text) > self.max_output:
            half = self.max_output // 2
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
        if ran.return_code in (124, 137):
            text += f"\n[ended with exit code {ran.return_code}; the limit is {self.command_seconds} s]"
        elif ran.return_code:
            text += f"\n[exit code {ran.return_code}]"
        return text or "[no output]"

    def _save(self, session: str, steps: list[Json], record: Json | None, stop: str, context: AgentContext) -> None:
        """Write the trajectory and the record, if the endpoint gave one, and fill Harbor's context."""
        details = list(_rows_of(record)) if record is not None else []
        answers = [step for step in steps if step["source"] == "agent"]
        if len(details) == 1 and len(details[0]["completion_token_ids"]) == len(answers):
            for number, step in enumerate(answers):
                ids = {name: details[0][name][number] for name in ("prompt_token_ids", "completion_token_ids")}
                step.setdefault("metrics", {}).update(ids)
                if "logprobs" in details[0]:
                    step["metrics"]["logprobs"] = details[0]["logprobs"][number]
        totals = {
            name: sum(step.get("metrics", {}).get(name, 0) for step in answers)
            for name in ("prompt_tokens", "completion_tokens")
        }
        document = {
            "schema_version": "ATIF-v1.8",
            "session_id": session,
            "trajectory_id": session,
            "agent": {"name": self.name(), "version": VERSION, "tool_definitions": [BASH]},
            "steps": steps,
            "final_metrics": {f"total_{name}": total for name, total in totals.items()} | {"total_steps": len(steps)},
            "extra": {"stop": stop},
        }
        if self._served_model:
            document["agent"]["model_name"] = self._served_model
        (self.logs_dir / "trajectory.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
        if record is not None:
            line = json.dumps(record, ensure_ascii=False) + "\n"
            (self.logs_dir / "record.jsonl").write_text(line, encoding="utf-8")
        context.n_input_tokens, context.n_output_tokens = totals["prompt_tokens"], totals["completion_tokens"]
        context.rollout_details = details or None
        context.metadata = {"stop": stop, "turns": len(answers), "session": session}

    def _client(self, url: str) -> httpx.AsyncClient:
        key = self._get_env(API_KEY)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=_SESSION_SECONDS, trust_env=False)


def _rows_of(record: Json) -> Iterator[Json]:
    """Yield the prompt, the completion and the log-probabilities of each answer, in one `RolloutDetail` a training
    row."""
    start, contexts = record["prompt_segments"], record["contexts"]
    first = [token for segment in record["segments"][:start] for token in segment["tokens"]]
    for row, prompt in enumerate([first, *(context["tokens"] for context in contexts)]):
        detail: Json = {"prompt_token_ids": [], "completion_token_ids": [], "logprobs": []}
        for segment in record["segments"][start:]:
            if segment["row"] == row:
                if segment["author"] == "model" and not segment["edited"]:
                    detail["prompt_token_ids"].append(prompt)
                    detail["completion_token_ids"].append(segment["tokens"])
                    detail["logprobs"].append(segment["log_probs"])
                prompt = prompt + segment["tokens"]
        if any(not _are_finite(each) for each in detail["logprobs"]):
            del detail["logprobs"]
        yield detail


def _are_finite(log_probs: list[Any] | None) -> bool:
    """Whether they are there; a record has a minus infinity as text."""
    return log_probs is not None and not any(isinstance(each, str) for each in log_probs)


def _tool_call(call: Json) -> Json:
    function = call["function"]
    arguments = _parse_arguments(function["arguments"])
    return {"tool_call_id": call["id"], "function_name": function["name"], "arguments": arguments}


def _parse_arguments(text: str) -> Json:
    """Return the arguments of a call, or the text as ``input`` if it is not a JSON object."""
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"input": text}


async def _answer_of(request: Any, url: str) -> Json:
    """Return the body of an answer of the endpoint. Raises RuntimeError that says what it did not do."""
    try:
        answer = await request
    except httpx.TransportError as error:
        raise RuntimeError(f"verl-tool's eval endpoint at {url} does not answer ({error!r}); start it") from error
    if answer.is_error:
        raise RuntimeError(f"{answer.request.url} answered {answer.status_code}: {answer.text[:500]}")
    body: Json = answer.json()
    return body


def _with_port(url: str, port: int | None) -> str:
    """Return the address of the replica that has the session, which may have a port of its own."""
    if port is None:
        return url
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()
