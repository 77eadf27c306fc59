"""Agents that nobody changes: what was trained is what was sampled, and what is evaluated."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_server import serve_asgi
from real_templates import TEMPLATE_DIR
from run_folders import run_folder
from toy_tools import picture

pytest.importorskip("openai")
pytest.importorskip("verl")
pytest.importorskip("torch")

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput
from verl_loop import make_tokenizer

from eval_service import evaluate as program
from eval_service.evaluation.agent_asking import AgentAsker
from eval_service.evaluation.asking import Asking
from eval_service.evaluation.dataset import read_problems
from eval_service.evaluation.record import read_records
from eval_service.evaluation.scoring import reward_config, reward_of_run
from eval_service.model.run_config import read_run, run_config
from eval_service.openai.endpoint import Endpoint
from eval_service.service import Service
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.generators.verl_generator import EngineUse
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.verl.agent_loop import ToolLoopOutput, as_verl_outputs
from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.content.parts import to_wire
from verl_tool.errors import ConfigError
from verl_tool.gateway.agent_host import PROGRAM
from verl_tool.gateway.verl_agent_loop import make_agent_loop
from verl_tool.sandbox.isolation.levels import Level, strongest
from verl_tool.verification import STYLE, Verification

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or strongest().level is not Level.full, reason="no sandbox here"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

INSTALL = Path(os.environ.get("VERL_TOOL_AGENTS", Path(__file__).parents[3] / ".agents"))
INSTALLED = {"mini_swe_agent": "mini/bin/mini", "pi": "node_modules/.bin/pi"}
AGENT = '''
"""Runs the commands that a model wants."""
import json, os, subprocess, sys, urllib.request

messages = [{"role": "user", "content": sys.argv[1]}]
tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
while True:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages, "tools": [tool]}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
'''
MANAGER = f'''
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade


class ByFile(GradingRewardManager):
    async def grade(self, sample):
        right = sample.trajectory.extra["{PROGRAM}"]["files"].get("answer.txt") == sample.ground_truth
        return Grade(float(right), right)
'''
QUESTION = "Read note.txt and write the number into answer.txt."


def shell(command: str) -> str:
    """A call, with more white space than a chat template writes."""
    return f'<tool_call>\n{{"name":  "bash", "arguments": {{"command": {json.dumps(command)} }} }}\n</tool_call>'


class Model:
    """Writes by script: its turn follows from how many it sees in the prompt."""

    def __init__(self, tokenizer: Any, last: str) -> None:
        self.tokenizer = tokenizer
        self._turns = [shell("cat note.txt"), shell("echo 42 > answer.txt"), last]
        self.sampled: list[tuple[list[int], list[int]]] = []
        self.params: list[dict[str, Any]] = []

    def write(self, prompt_ids: Sequence[int], params: dict[str, Any]) -> list[int]:
        number = self.tokenizer.decode(prompt_ids).count("<|im_start|>assistant") - 1
        ids = self.tokenizer.encode(self._turns[number] + "<|im_end|>", add_special_tokens=False)
        self.sampled.append((list(prompt_ids), ids))
        self.params.append(params)
        return list(ids)


class TrainingEngine(Model):
    """As verl's client."""

    async def generate(self, request_id, *, prompt_ids, sampling_params, priority=0):
        ids = self.write(prompt_ids, sampling_params)
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed")


class EndpointEngine(Model):
    """As an engine of the endpoint."""

    max_model_len = 100_000

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    async def generate(self, prompt_ids, sampling_params, request_id, listen=None, images=()):
        ids = self.write(prompt_ids, sampling_params)
        return Generation(ids, [-0.5] * len(ids), "stop")

    async def check(self) -> None:
        pass


def qwen_tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = (TEMPLATE_DIR / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
    return tokenizer


def trained_on(agent: str, tmp_path: Path) -> Path:
    """The folder of a training with an agent."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (tmp_path / "by_file.py").write_text(MANAGER)
    (tmp_path / "agent.py").write_text(AGENT)
    started = [f"gateway.program.preset={agent}", f"gateway.program.install={INSTALL}"]
    if agent == "program":
        started = [f"gateway.program.command=[python,{tmp_path}/agent.py,'{{task}}']"]
        started += [f"gateway.program.readable=[{tmp_path}/agent.py]"]
    elif not (INSTALL / INSTALLED[agent]).exists():
        pytest.skip(f"{agent} is not installed in {INSTALL}; run bash scripts/install_agents.sh")
    return run_folder(
        tmp_path,
        *(*started, "gateway.program.keep_files=[answer.txt]", "gateway.program.seconds=120", "trainer.use_v1=true"),
        *("gateway.session.max_tokens=700", "+gateway.session.sampling={top_k:7}", "tool_server.start=null"),
        *("actor_rollout_ref.agent.enable_agent=false", "actor_rollout_ref.agent.tool_schemas=none"),
        *("actor_rollout_ref.rollout.max_model_len=100000", f"actor_rollout_ref.model.path={tmp_path}"),
        *("reward.reward_manager.source=importlib", "reward.reward_manager.name=ByFile"),
        f"reward.reward_manager.module.path={tmp_path}/by_file.py",
    )


def data_row(**changes: Any) -> dict[str, Any]:
    files = {"workspace_files": pack_files({"note.txt": PackedFile(b"The number is 42.\n")})}
    row = {"prompt": [{"role": "user", "content": QUESTION}], "extra_info": {"tools_kwargs": files}}
    return row | {"data_source": "notes", "reward_model": {"style": "rule", "ground_truth": "42\n"}} | changes


async def train(folder: Path, engine: TrainingEngine, row: dict[str, Any]) -> list[ToolLoopOutput]:
    """The training rows of a sample of `row`, as verl's worker asks for it."""
    config = OmegaConf.load(folder / "config/config.yaml")
    wrapped = DictConfigWrap(config)
    loop = make_agent_loop(
        trainer_config=wrapped,
        server_manager=engine,
        tokenizer=engine.tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
    )
    sampling = {"temperature": 0.25, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    others = {"raw_prompt": row["prompt"], "tools_kwargs": row["extra_info"]["tools_kwargs"]}
    outputs = await loop.run(sampling, **others, **{name: row[name] for name in ("data_source", "reward_model")})
    return outputs if isinstance(outputs, list) else [outputs]


@asynccontextmanager
async def served(folder: Path, engine: EndpointEngine, **options: Any) -> AsyncIterator[str]:
    """The endpoint as ``--from_run`` makes it, over `engine`."""
    run = read_run(folder)
    service = Service(
        *(engine, HFTokenizer(engine.tokenizer), None, run.options),
        sampling=run.sampling,
        tool_descriptions=run.tool_descriptions,
    )
    endpoint = Endpoint(service, "model", **options)
    url, server, task = await serve_asgi(endpoint)
    yield f"{url}/v1"
    server.should_exit = True
    await task
    await service.aclose()


def evaluation(tmp_path: Path, url: str, row: dict[str, Any], gateway: str = "{}") -> program.Evaluation:
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    agent = program._agent(None, gateway, tmp_path / "my_run")
    problems = tuple(read_problems(tmp_path / "test.jsonl"))
    return program.Evaluation(problems, Asking(url), tmp_path / "out", (1,), "test", agent=agent)


def rows(outputs: Sequence[ToolLoopOutput]) -> list[tuple[list[int], list[int], list[int]]]:
    return [(output.prompt_ids, output.response_ids, output.response_mask) for output in outputs]


@pytest.mark.parametrize("agent", ["program", "mini_swe_agent", "pi"])
async def test_what_is_trained_is_what_is_sampled_and_evaluated(agent: str, tmp_path: Path) -> None:
    folder, row, tokenizer = trained_on(agent, tmp_path), data_row(), qwen_tokenizer()
    last = shell("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") if agent == "mini_swe_agent" else "Done:  42."
    training, endpoint = TrainingEngine(tokenizer, last), EndpointEngine(tokenizer, last)
    outputs = await train(folder, training, row)
    async with served(folder, endpoint) as url:
        this = evaluation(tmp_path, url, row)
        summary = await program.evaluate(this, reward_of_run(run_config(folder), None, {}), tokenizer)
    [record] = read_records(tmp_path / "out/records.jsonl")
    assert record.trajectory is not None
    [(prompt, response, mask)] = rows(outputs)
    # Sampled in training, and trained.
    assert [token for token, trained in zip(response, mask, strict=True) if trained] == [
        token for _, ids in training.sampled for token in ids
    ]
    whole = prompt + response
    assert len(training.sampled) == 3
    for context, ids in training.sampled:
        assert whole[: len(context) + len(ids)] == context + ids
    # Evaluated.
    assert endpoint.sampled == training.sampled
    evaluated = as_verl_outputs(record.trajectory, EngineUse(0, 0), HFTokenizer(tokenizer))
    assert rows(evaluated) == rows(outputs)
    trained = outputs[-1].extra_fields["trajectory"]
    assert record.trajectory.extra[PROGRAM]["files"] == trained.extra[PROGRAM]["files"] == {"answer.txt": "42\n"}
    assert record.trajectory.stop is trained.stop
    for name in ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "stop_token_ids"):
        assert endpoint.params[0][name] == training.params[0][name], name
    assert endpoint.params[0]["top_k"] == 7
    assert (summary.accuracy.value, summary.errors, record.correct) == (1.0, 0, True)


@pytest.mark.parametrize(
    ("agent", "wanted", "score"), [("program", "42", 1.0), ("program", "41", 0.0), ("mini_swe_agent", "42", 1.0)]
)
async def test_verifiers_check_what_programs_leave_in_training_and_evaluation(
    agent: str, wanted: str, score: float, tmp_path: Path
) -> None:
    folder, tokenizer = trained_on(agent, tmp_path), qwen_tokenizer()
    last = shell("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") if agent == "mini_swe_agent" else "Done."
    script = f'[ "$(cat answer.txt)" = {wanted} ] && echo 1 > /logs/verifier/reward.txt'
    check = Verification(files=pack_files({"test.sh": PackedFile(f"{script}; exit 0".encode())}))
    row = data_row(reward_model={"style": STYLE, "ground_truth": check.model_dump_json()})
    outputs = await train(folder, TrainingEngine(tokenizer, last), row)
    async with served(folder, EndpointEngine(tokenizer, last)) as url:
        summary = await program.evaluate(evaluation(tmp_path, url, row), reward_config("terminal", {}), tokenizer)
    verdict = outputs[-1].extra_fields["trajectory"].verdict
    assert (verdict.fault, verdict.score) == (None, score)
    assert (summary.accuracy.value, summary.errors) == (score, 0)


async def test_a_program_that_never_calls_the_model_is_no_answer(tmp_path: Path) -> None:
    folder, tokenizer = trained_on("program", tmp_path), qwen_tokenizer()
    (tmp_path / "agent.py").write_text("print('it has no model')")
    async with served(folder, EndpointEngine(tokenizer, "Done."), api_key="boss") as url:
        this = evaluation(tmp_path, url, data_row())
        this = replace(this, asking=replace(this.asking, api_key="boss"))
        summary = await program.evaluate(this, reward_of_run(run_config(folder), None, {}), tokenizer)
    [record] = read_records(tmp_path / "out/records.jsonl")
    assert "exited with 0 without a request to the model; it printed: it has no model" in (record.error or "")
    assert (summary.errors, summary.answers) == (1, 0)


async def test_without_a_run_a_program_gets_the_context_of_the_endpoint(tmp_path: Path) -> None:
    folder, tokenizer = trained_on("program", tmp_path), qwen_tokenizer()
    (tmp_path / "context.py").write_text("import sys; print('context', sys.argv[1])")
    command = json.dumps(
        {"program": {"command": ["python", f"{tmp_path}/context.py", "{context}"], "readable": [str(tmp_path)]}}
    )
    async with served(folder, EndpointEngine(tokenizer, "Done.")) as url:
        this = evaluation(tmp_path, url, data_row())
        [record] = await program.answers(replace(this, agent=program._agent(None, command, None)))
    assert record.error is not None
    assert "it printed: context 100000" in record.error


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("http://box.example:8000/v1", "http://box.example:4000"),
        ("http://[::1]:8000/v1", "http://[::1]:4000"),
        ("http://box.example/v1/", "http://box.example:4000"),
        ("https://box.example/v1", None),
    ],
)
async def test_a_session_of_one_of_several_replicas_is_at_the_endpoints_host(
    url: str, own: str | None, tmp_path: Path
) -> None:
    gateway = program._agent(None, json.dumps({"program": {"command": ["true"]}}), None)
    assert gateway is not None
    asker = AgentAsker(Asking(url), gateway)
    if own is not None:
        assert asker._url_at(4000) == own
    else:
        with pytest.raises(ConfigError, match="without TLS"):
            asker._url_at(4000)
    assert asker._url_at(None) == url.rstrip("/").removesuffix("/v1")
    await asker._client.close()


async def test_what_an_agent_cannot_be_evaluated_with_is_named(tmp_path: Path) -> None:
    folder, tokenizer = trained_on("program", tmp_path), qwen_tokenizer()
    (tmp_path / "out").mkdir()
    engine = EndpointEngine(tokenizer, "Done.")
    async with served(folder, engine, api_key="boss") as url:
        this = evaluation(tmp_path, url, data_row())
        with pytest.raises(ConfigError, match="api key"):
            await program.answers(this)
        prompt = [{"role": "user", "content": "<image>"}]
        this = evaluation(tmp_path, url, data_row(prompt=prompt, images=[{"url": to_wire(picture(9))}]))
        with pytest.raises(ConfigError, match="row 0 of the data"):
            await program.answers(replace(this, asking=replace(this.asking, api_key="boss")))
