"""The service with vLLM, a real tiny model and a real tool server, as clients see it. One start for all tests.

It answers as a run of the trainer did (`--from_run`), inline.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from live_service import LiveService, live_service, stop
from validated_run import RESPONSE_LENGTH, ValidatedRun, answers, assert_equal, validated_run

if TYPE_CHECKING:
    from calculator_run import Calculator

openai = pytest.importorskip("openai")
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("verl")

from transformers import AutoModelForCausalLM  # noqa: E402

from eval_service.evaluation.record import read_records  # noqa: E402
from verl_tool.agent_loop.trajectory import Trajectory  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1500)]

NAME = "calculator"
ROOT = Path(__file__).parents[2]
ENDLESS: dict[str, Any] = {"logit_bias": {"2": -100}, "extra_body": {"tool_choice": "none"}}
"""Asks for an answer that only the run's limit ends: token 2 is the model's end token."""
QUESTIONS = [f"What is {a}.5{op}{b}?" for a, b, op in zip(range(10, 50), range(50, 90), "+-*+" * 10, strict=True)]


@pytest.fixture(scope="module")
def run(calculator: Calculator, tmp_path_factory: pytest.TempPathFactory) -> ValidatedRun:
    return validated_run(tmp_path_factory.mktemp("inline") / "run", calculator)


@pytest.fixture(scope="module")
def service(run: ValidatedRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    arguments = [*run.service_arguments, "--served_model_name", NAME]
    with live_service(arguments, tmp_path_factory.mktemp("service")) as running:
        yield running


def ask(service: LiveService, question: str = QUESTIONS[0], **fields: Any) -> dict[str, Any]:
    request = {
        "model": NAME,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
    }
    extra = {name: fields.pop(name) for name in ("return_trajectory",) if name in fields}
    return {**request, **fields, "extra_body": extra}


def sync_client(service: LiveService) -> Any:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=300)


def async_client(service: LiveService) -> Any:
    return openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=300)


async def test_tokens_masks_and_calls_are_those_of_the_trainers_validation(
    service: LiveService, run: ValidatedRun
) -> None:
    served = await answers(service.url, NAME, run)
    assert_equal(served, run.trajectories)


def test_evaluate_tells_the_success_of_the_trainers_validation(
    service: LiveService, run: ValidatedRun, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "eval_service.evaluate", "--data", run.data, "--out", tmp_path]
    command += ["--from_run", run.folder, "--tokenizer", run.model, "--base_url", f"{service.url}/v1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    records = list(read_records(tmp_path / "records.jsonl"))
    told = {tuple(r.trajectory.prompt_ids): r.score for r in records if r.trajectory is not None}
    assert told == {tuple(t.prompt_ids): t.reward for t in run.trajectories}
    assert any(told.values()), "no answer is right; equal scores would show nothing"
    assert not all(told.values())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["answers"] == len(run.trajectories)
    assert summary["accuracy"]["value"] == pytest.approx(sum(t.reward for t in run.trajectories) / len(records))
    assert summary["tools"]["SimpleCalculatorTool"]["calls"] > 0


def test_the_synchronous_client_gets_answers_and_some_call_the_tool(service: LiveService) -> None:
    with sync_client(service) as client:
        answers = [client.chat.completions.create(**ask(service, question)) for question in QUESTIONS[:8]]
    assert all(answer.choices[0].message.content for answer in answers)
    assert sum(answer.usage.tool_calls for answer in answers) > 0


async def test_a_stream_is_the_same_answer_in_pieces(service: LiveService) -> None:
    async with async_client(service) as client:
        for question in QUESTIONS[:4]:
            whole = await client.chat.completions.create(**ask(service, question, return_trajectory=True))
            stream = await client.chat.completions.create(**ask(service, question, stream=True))
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            messages = [m for chunk in chunks for m in getattr(chunk.choices[0].delta, "tool_messages", ())]
            assert text.endswith(whole.choices[0].message.content)
            calls = whole.choices[0].trajectory["calls"]
            told = [call["observation"] for call in calls if call["observation"] or not call["done"]]
            assert [message["content"] for message in messages] == told
            assert chunks[-1].usage == whole.usage
            assert len(chunks) > 3


async def test_greedy_tokens_and_log_probs_are_those_of_the_model_itself(
    service: LiveService, run: ValidatedRun
) -> None:
    """The model, asked anew about every position of what the trajectory says it saw, would have written the same."""
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    async with async_client(service) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(**ask(service, q, return_trajectory=True, logprobs=True))
                for q in QUESTIONS
            )
        )
    called = 0
    for answer in answers:
        trajectory = Trajectory.from_json(json.dumps(answer.choices[0].trajectory))
        called += len(trajectory.calls)
        ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
        with torch.no_grad():
            log_probs = model(ids).logits.log_softmax(-1)[0, len(trajectory.prompt_ids) - 1 : -1]
        told = trajectory.response_log_probs
        assert told is not None
        for position, (token, mask) in enumerate(zip(trajectory.response_ids, trajectory.response_mask, strict=True)):
            if mask:
                assert log_probs[position, token] >= log_probs[position].max() - 1e-3
                # vLLM tells log-probabilities under the distribution that it draws from; greedily that is one token.
                assert told[position] == pytest.approx(0.0, abs=1e-3) or told[position] == pytest.approx(
                    float(log_probs[position, token]), abs=1e-3
                )
            else:
                assert told[position] == 0.0
    assert called > 0


async def test_200_chats_at_once(service: LiveService) -> None:
    async with async_client(service) as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(**ask(service, QUESTIONS[i % 40])) for i in range(200))
        )
    by_question = {i: {answers[j].choices[0].message.content for j in range(i, 200, 40)} for i in range(40)}
    assert all(len(contents) == 1 for contents in by_question.values())
    assert service.metric("verl_tool_eval_running") == 0


async def test_a_client_that_disconnects_stops_the_generation(service: LiveService) -> None:
    cancelled = service.metric("verl_tool_eval_cancelled_total")
    async with async_client(service) as client:
        stream = await client.completions.create(
            model=NAME, prompt=QUESTIONS[0], stream=True, n=64, temperature=1.0, **ENDLESS
        )
        await anext(aiter(stream))
        await stream.close()
    service.wait_for("verl_tool_eval_cancelled_total", cancelled + 1)
    service.wait_for("verl_tool_eval_running", 0)


async def test_sampling_with_a_seed_is_repeatable(service: LiveService) -> None:
    async with async_client(service) as client:
        request = ask(service, n=4, seed=3, temperature=1.0)
        first, second = [await client.chat.completions.create(**request) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, second)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_the_readmes_examples_run_as_written(service: LiveService) -> None:
    text = (ROOT / "eval_service/README.md").read_text()
    examples = [block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if block.startswith("curl")]
    assert len(examples) == 4
    for example in examples:
        run = subprocess.run(
            ["bash", "-c", example],
            env={**os.environ, "BASE_URL": f"{service.url}/v1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert '"error"' not in run.stdout
        assert f'"{NAME}"' in run.stdout
    assert "data: [DONE]" in _run(examples[2], service)


def _run(example: str, service: LiveService) -> str:
    environment = {**os.environ, "BASE_URL": f"{service.url}/v1"}
    return subprocess.run(["bash", "-c", example], env=environment, capture_output=True, text=True, timeout=120).stdout


def test_stopping_answers_what_runs(service: LiveService) -> None:
    """The last test: it ends the service."""
    told: list[Any] = []

    def long_chat() -> None:
        with sync_client(service) as client:
            request = {"model": NAME, "prompt": QUESTIONS[0], "n": 32, "temperature": 1.0, "logprobs": 0}
            told.append(client.completions.create(**request, **ENDLESS))

    asking = threading.Thread(target=long_chat)
    asking.start()
    service.wait_for("verl_tool_eval_running", 32)
    assert stop(service) == 0
    asking.join(60)
    assert [len(choice.logprobs.tokens) for choice in told[0].choices] == [RESPONSE_LENGTH] * 32
