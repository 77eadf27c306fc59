"""Rows with images as verl drives them: a real processor and tokenizer, a live tool server, a scripted engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")
pytest.importorskip("torchvision", reason="torchvision is not here: source scripts/env.sh train")

import shown_tool  # noqa: E402
from live_server import LiveServers  # noqa: E402
from shown_tool import striped  # noqa: E402
from tiny_vision import make_vision_model  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker  # noqa: E402
from verl.utils import hf_processor, hf_tokenizer  # noqa: E402
from verl.utils.model import extract_multi_modal_inputs  # noqa: E402
from verl_loop import ScriptedEngine, composed, loop_of, make_loop, make_tokenizer  # noqa: E402

from verl_tool.agent_loop.row import VALIDATION  # noqa: E402
from verl_tool.agent_loop.verl.agent_loop import ToolLoopOutput, VerlToolAgentLoop  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.protocol import FaultKind  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402


class LookingEngine(ScriptedEngine):
    """Notes the images of each turn, and cannot read what is no image of Pillow."""

    def __init__(self, tokenizer: Any, *lines: str) -> None:
        super().__init__(tokenizer, *lines)
        self.seen: list[list[tuple[int, int]]] = []

    async def generate(self, request_id, *, image_data=(), **named):
        self.seen.append([image.size for image in image_data])
        return await super().generate(request_id, **named)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_vision_model("qwen3_vl", folder)
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return hf_processor(str(folder))


def loop_over(folder: Path, processor: Any, engine: ScriptedEngine, *overrides: str) -> VerlToolAgentLoop:
    config = composed(
        "data.max_response_length=200",
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.rollout.name=sglang",  # vLLM is named images in Ray's store
        *overrides,
    )
    tokenizer = processor.tokenizer if processor else hf_tokenizer(str(folder))
    return loop_of(config, tokenizer, engine, processor)


NO_TOOLS = "actor_rollout_ref.agent.enable_agent=false"


def shown_in_row(*images: Any, text: str = "Which digit?") -> dict[str, Any]:
    """As verl's data set makes a row."""
    parts = [{"type": "image", "bytes": image.data, "image": image.decode()} for image in images]
    return {"raw_prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], "index": 5}


def trained_on(processor: Any, output: ToolLoopOutput) -> tuple[torch.Tensor, dict[str, Any]]:
    """The positions and the model's other inputs, as verl's worker makes them."""
    worker = SimpleNamespace(processor=processor, tokenizer=processor.tokenizer, _get_mm_processor_kwargs=lambda _: {})
    ids = torch.tensor([output.prompt_ids + output.response_ids])
    inputs = AgentLoopWorker._compute_multi_modal_inputs(worker, output, ids)
    positions = AgentLoopWorker._compute_position_ids(worker, ids, torch.ones_like(ids), inputs)
    inputs.pop("images_seqlens", None)
    return positions, extract_multi_modal_inputs([inputs])


def by_the_processor(processor: Any, output: ToolLoopOutput, images: list[Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """As verl makes them of a trajectory whose loop made none."""
    plain = SimpleNamespace(multi_modal_data={"images": [i.decode() for i in images]}, mm_processor_kwargs=None)
    plain.prompt_ids, plain.response_ids = output.prompt_ids, output.response_ids
    return trained_on(processor, plain)


async def test_images_of_the_prompt_and_of_a_tool(servers: LiveServers, folder: Path, processor: Any) -> None:
    server = await servers.start(load_tools(shown_tool.__file__))
    engine = LookingEngine(processor.tokenizer, "one", "two", "three")
    loop = loop_over(
        folder,
        processor,
        engine,
        f"actor_rollout_ref.agent.tool_server_url={server.url}",
        "actor_rollout_ref.agent.enable_mtrl=true",
        "actor_rollout_ref.agent.max_turns=2",
        "actor_rollout_ref.agent.min_turns=2",
        "actor_rollout_ref.agent.tool_schemas=none",
    )
    own = [striped(1), striped(2, 40)]
    output = await loop.run({}, **shown_in_row(*own))
    record = output.extra_fields["trajectory"]
    assert record.fault is None
    assert record.images == {}, "their files cross to the trainer beside the record"
    images = [s.image for s in record.segments if s.image is not None]
    assert images[:2] == [image.sha256 for image in own]
    assert [len(sizes) for sizes in engine.seen] == sorted(len(sizes) for sizes in engine.seen)
    assert engine.seen[0] == [(96, 64), (96, 40)]
    assert len(engine.seen[-1]) == len(images) > 2
    for (_, before, *_), (_, after, *_) in zip(engine.asked, engine.asked[1:], strict=False):
        assert after[: len(before)] == before
    positions, inputs = trained_on(processor, output)
    assert inputs["image_grid_thw"].shape == (len(images), 3)
    ids = torch.tensor(output.prompt_ids + output.response_ids)
    assert (ids == processor.image_token_id).sum() == inputs["image_grid_thw"].prod(1).sum() // 4
    assert positions.shape == (1, 4, len(ids))
    assert not any(
        mask
        for token, mask in zip(output.response_ids, output.response_mask, strict=True)
        if token == processor.image_token_id
    )


@pytest.mark.parametrize("images", [[], [striped(1)], [striped(1), striped(2, 40), striped(3, 128)]], ids=len)
async def test_what_the_model_is_given_is_what_verl_would_give_it(
    folder: Path, processor: Any, images: list[Any]
) -> None:
    loop = loop_over(folder, processor, LookingEngine(processor.tokenizer, "4"), NO_TOOLS)
    output = await loop.run({}, **shown_in_row(*images))
    (positions, inputs), (wanted_positions, wanted) = (
        trained_on(processor, output),
        by_the_processor(processor, output, images) if images else trained_on(processor, output),
    )
    assert torch.equal(positions, wanted_positions)
    assert set(inputs) == set(wanted) == ({"pixel_values", "image_grid_thw"} if images else set())
    assert all(torch.equal(inputs[name], wanted[name]) for name in inputs)


async def test_a_column_of_files_and_tags_in_the_text(folder: Path, processor: Any) -> None:
    engine = LookingEngine(processor.tokenizer, "4")
    row = {"raw_prompt": [{"role": "user", "content": "<image>?"}], "images": [{"bytes": striped(1).data}]}
    await loop_over(folder, processor, engine, NO_TOOLS).run({}, **row)
    assert engine.seen == [[(96, 64)]]


@pytest.mark.parametrize(("wanted", "kept"), [("all", 2), ("validation", 1), ("none", 0)])
async def test_images_are_kept_beside_the_records(
    folder: Path, processor: Any, tmp_path: Path, wanted: str, kept: int
) -> None:
    options = (f"trajectories_dir={tmp_path}", f"actor_rollout_ref.agent.record_images={wanted}")
    loop = loop_over(folder, processor, LookingEngine(processor.tokenizer, "4", "5"), NO_TOOLS, *options)
    await loop.run({}, **shown_in_row(striped(1)))
    await loop.run({}, **shown_in_row(striped(2)), **{VALIDATION: True})
    files = sorted(path.name for path in tmp_path.rglob("images/*"))  # noqa: ASYNC240
    assert files == sorted(f"{striped(n).sha256}.png" for n in range(3 - kept, 3))


async def test_what_concerns_one_trajectory_is_its_fault_alone(folder: Path, processor: Any) -> None:
    loop = loop_over(folder, processor, LookingEngine(processor.tokenizer, "4"), NO_TOOLS)
    broken = replace(striped(1), data=striped(1).data[:-40])
    for row, words in (
        (
            shown_in_row(text="<|vision_start|><|image_pad|><|vision_end|>"),
            "row 5 of the data: the prompt has 1 places",
        ),
        (shown_in_row(striped(1), text="<|image_pad|>"), "row 5 of the data: the prompt has 2 places"),
        ({"raw_prompt": [{"role": "user", "content": [{"type": "image", "bytes": broken.data}]}]}, "cannot be decoded"),
    ):
        output = await loop.run({}, **row)
        record = output.extra_fields["trajectory"]
        assert record.fault is not None
        assert words in record.fault.message
        assert not any(output.response_mask)
        positions, _ = trained_on(processor, output)
        assert positions.shape[-1] == len(output.prompt_ids) + len(output.response_ids)
    assert record.fault.kind is FaultKind.TOOL_CRASHED


async def test_more_images_than_the_engine_takes(folder: Path, processor: Any) -> None:
    limit = "+actor_rollout_ref.rollout.limit_images=1"
    loop = loop_over(folder, processor, LookingEngine(processor.tokenizer, "4"), NO_TOOLS, limit)
    output = await loop.run({}, **shown_in_row(striped(1), striped(2)))
    fault = output.extra_fields["trajectory"].fault
    assert fault is not None
    assert fault.message == "2 images in one trajectory, and the engine takes 1; raise limit_images"
    assert trained_on(processor, output)[1]["image_grid_thw"].shape == (2, 3)


async def test_what_the_model_does_not_read_is_refused_by_name(folder: Path, processor: Any) -> None:
    tokenizer = make_tokenizer()
    text_only = make_loop(tokenizer, ScriptedEngine(tokenizer, "4"), NO_TOOLS)
    with pytest.raises(ConfigError, match="row 5 of the data has images, and the model is not there"):
        await text_only.run({}, **shown_in_row(striped(1)))
    loop = loop_over(folder, processor, LookingEngine(processor.tokenizer, "4"), NO_TOOLS)
    with pytest.raises(ConfigError, match="row 5 of the data has content in 'videos'"):
        await loop.run({}, **shown_in_row(striped(1)), videos=["a.mp4"])
    with pytest.raises(ConfigError, match="verl could not make its processor"):
        loop_over(folder, None, LookingEngine(None, "4"), NO_TOOLS)
