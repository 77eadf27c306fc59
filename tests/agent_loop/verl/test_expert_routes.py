"""Routes of a trajectory with observations, from the engine's turns to verl's own consumer of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from live_server import LiveServers  # noqa: E402
from mocked_packages import import_with_mocks  # noqa: E402
from transformers import Qwen2Config, Qwen3MoeConfig  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402
from verl_loop import ScriptedEngine, make_loop, make_tokenizer  # noqa: E402

from verl_tool.agent_loop.verl.agent_loop import ToolLoopOutput  # noqa: E402
from verl_tool.agent_loop.verl.expert_routes import ExpertRoutes  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402

LAYERS, TOP_K, EXPERTS = 3, 2, 8
ROUTES = ExpertRoutes(LAYERS, TOP_K, EXPERTS)
AFFECTED = ["verl.utils.megatron", "verl.models.mcore"]
CALL = "<request><calculator>6*7<call>"
PROMPT = [{"role": "user", "content": "6*7?"}]


def route(position: int, token: int) -> np.ndarray:
    """The experts of a token at a position, another row for each: two different ones in each layer."""
    first = (np.arange(LAYERS) + position + 3 * token) % EXPERTS
    return np.stack([first, (first + 1 + position % 5) % EXPERTS], axis=-1)


def routes_of(ids: list[int]) -> np.ndarray:
    """What an engine records that was fed `ids`, as int32. [tokens, layers, top_k]"""
    return np.stack([route(position, token) for position, token in enumerate(ids)]).astype(np.int32)


class RoutingEngine(ScriptedEngine):
    """Tells the experts of all tokens that it was fed: of prompt and turn, the last token left out, as vLLM does."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **named: Any) -> TokenOutput:
        output = await super().generate(request_id, prompt_ids=prompt_ids, **named)
        output.routed_experts = routes_of([*prompt_ids, *output.token_ids])[:-1]
        return output


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    config = Qwen3MoeConfig(num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    config.save_pretrained(folder)
    return folder


async def trajectory(moe: Path, url: str | None, *lines: str, overrides: tuple[str, ...] = ()) -> ToolLoopOutput:
    tokenizer = make_tokenizer()
    tools = f"actor_rollout_ref.agent.tool_server_url={url}" if url else "actor_rollout_ref.agent.enable_agent=false"
    loop = make_loop(
        tokenizer,
        RoutingEngine(tokenizer, *lines),
        *(f"actor_rollout_ref.model.path={moe}", "actor_rollout_ref.rollout.enable_rollout_routing_replay=true"),
        *("actor_rollout_ref.agent.action_stop_tokens=['<call>']", tools, "data.max_response_length=200", *overrides),
    )
    return await loop.run({}, raw_prompt=PROMPT)


def replayed_rows(outputs: list[ToolLoopOutput]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Targets and mask of each row of a batch, by verl's own code of R3 for Megatron."""
    replay = import_with_mocks("verl.utils.megatron.router_replay_utils", "megatron", AFFECTED)
    fields = [output.as_dict() for output in outputs]
    ids = [torch.cat([row["prompts"], row["responses"]]) for row in fields]
    nested = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    routes = torch.nested.as_nested_tensor([row["routed_experts"] for row in fields], layout=torch.jagged)
    longest = max(len(row["response_mask"]) for row in fields)
    masks = [torch.nn.functional.pad(row["response_mask"], (0, longest - len(row["response_mask"]))) for row in fields]
    targets = replay.align_r3_router_replay_data(routes, nested)
    mask = replay.build_r3_replay_mask(nested, torch.stack(masks))
    return list(targets.unbind()), list(mask.unbind())


async def test_verl_replays_what_the_engine_chose_for_prompt_turns_and_observations(
    servers: LiveServers, moe: Path
) -> None:
    server = await servers.start(load_tools("calculator"))
    # What stands behind the stop string is dropped, and with it its routes.
    whole = await trajectory(moe, server.url, f"{CALL} and more", f"{CALL}!", "42")
    fault = await trajectory(
        moe, "http://127.0.0.1:9", CALL, overrides=("actor_rollout_ref.agent.tool_call_max_retries=0",)
    )
    assert whole.response_mask.count(0) > 0
    targets, masks = replayed_rows([whole, fault])
    ids = [*whole.prompt_ids, *whole.response_ids]
    chosen = torch.from_numpy(routes_of(ids))
    assert masks[0].tolist() == [True] * (len(ids) - 1) + [False]
    assert torch.equal(targets[0][:-1].to(torch.int32), chosen[:-1])
    assert targets[0].dtype == torch.uint8
    assert not masks[1].any()


async def test_an_observation_that_no_turn_follows_has_different_experts(servers: LiveServers, moe: Path) -> None:
    server = await servers.start(load_tools("calculator"))
    last = "actor_rollout_ref.agent.force_finish_for_last_turn=true"
    output = await trajectory(moe, server.url, CALL, overrides=(last, "actor_rollout_ref.agent.max_turns=1"))
    observed = len(output.response_mask) - sum(output.response_mask)
    assert observed > 1
    assert output.response_mask[-observed:] == [0] * observed
    (targets,), (mask,) = replayed_rows([output])
    assert mask[-observed:-1].all()
    assert (targets[..., 0] != targets[..., 1]).all()


async def test_the_older_trainer_pads_rows_where_it_pads_tokens(moe: Path) -> None:
    output = await trajectory(moe, None, "42")
    worker: Any = SimpleNamespace(
        rollout_config=SimpleNamespace(prompt_length=16, response_length=32),
        tokenizer=make_tokenizer(),
        _compute_multi_modal_inputs=lambda *_: {},
        _compute_position_ids=lambda ids, *_: torch.zeros_like(ids),
        _get_mm_processor_kwargs=lambda *_: None,
        _compute_score=AsyncMock(),
        _compute_teacher_logprobs=AsyncMock(),
    )
    worker._pad_token_ids = partial(AgentLoopWorker._pad_token_ids, worker)
    padded = await AgentLoopWorker._agent_loop_postprocess(worker, output, False, raw_prompt=PROMPT)
    tokens = padded.attention_mask[0].bool()
    assert 0 < len(output.prompt_ids) < 16
    assert padded.routed_experts[0][tokens].tolist() == output.routed_experts.tolist()


@given(recorded=st.integers(0, 12), total=st.integers(1, 12))
def test_every_token_has_a_row_of_different_experts(recorded: int, total: int) -> None:
    told = routes_of(list(range(recorded))) if recorded else None
    rows = ROUTES.align(told, total)
    assert rows.shape == (total, LAYERS, TOP_K)
    assert (rows[..., 0] != rows[..., 1]).all()
    known = min(recorded, total)
    assert (rows[:known] == routes_of(list(range(recorded)))[:known]).all() if known else True


def test_many_experts_take_two_bytes() -> None:
    shape = ExpertRoutes(1, 1, 300)
    assert shape.align(np.full((2, 1, 1), 299, np.uint16), 3).tolist() == [[[299]]] * 3


def test_routes_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(4, 5, 2\).*\(3, 2\)"):
        ROUTES.align(np.zeros((4, 5, 2), np.uint8), 4)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="without experts"):
        ExpertRoutes.of_model(str(tmp_path))
