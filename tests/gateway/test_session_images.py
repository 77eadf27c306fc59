"""Images in sessions: what the model is fed, what is recorded, and what is rejected."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from agent_sessions import WritingGenerator
from real_templates import TemplateTokenizer
from template_families import QWEN
from toy_images import BEGIN, END_IMAGE, PAD, PLACEHOLDER, ToyImageTokens
from toy_tools import picture

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.rendering.images import ImagePlacer
from verl_tool.agent_loop.trajectory import Trajectory, read_jsonl, write_jsonl
from verl_tool.content.parts import ImagePart, to_wire
from verl_tool.formats import format_by_name
from verl_tool.gateway.dialects.base import Dialect, RequestError
from verl_tool.gateway.dialects.chat import ChatDialect
from verl_tool.gateway.dialects.messages import MessagesDialect
from verl_tool.gateway.dialects.responses import ResponsesDialect
from verl_tool.gateway.session import AgentSession, SessionModel, SessionOptions
from verl_tool.gateway.session_tree import ModelTurn


class ImageTokenizer(TemplateTokenizer):
    """With the control tokens of images, which the model's template does not name."""

    def __init__(self, name: str, ends: Sequence[str]) -> None:
        super().__init__(name, (*ends, BEGIN, PAD, END_IMAGE))
        self.eos_token_ids = frozenset(self.encode(end)[0] for end in ends)


TOKENIZER = ImageTokenizer("Qwen-Qwen3-0.6B", QWEN)
BROKEN = replace(picture(4, (3, 3)), data=picture(4, (3, 3)).data[:50])
"""Its header is whole, and its pixels are missing."""
ONE, TWO, WIDE = picture(1, (2, 2)), picture(2, (5, 2)), picture(3, (600, 2))
PAD_ID = TOKENIZER.encode(PAD)[0]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
SCHEMA = {"type": "object", "properties": {}}


class Looking(WritingGenerator):
    """Checks that each run of image tokens is as long as its image, and keeps the images."""

    seen: list[tuple[ImagePart, ...]]

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, images: Any = ()
    ) -> Generation:
        self.seen = [*getattr(self, "seen", []), tuple(images)]
        runs = "".join("x" if token == PAD_ID else " " for token in prompt_ids).split()
        assert [len(run) for run in runs] == [image.width for image in images]
        return await super().generate(prompt_ids, sampling_params, request_id)


def open_session(*turns: str, reads: bool = True, max_images: int | None = None, **options: Any) -> AgentSession:
    placer = ImagePlacer(ToyImageTokens(TOKENIZER), TOKENIZER) if reads else None  # type: ignore[arg-type]
    generator = Looking(TOKENIZER, turns)
    formats = [format_by_name("hermes")]
    model = SessionModel.create(generator, TOKENIZER, formats, 1 << 16, images=placer, max_images=max_images)
    return AgentSession("s", model, SessionOptions(**options))


async def ask(session: AgentSession, dialect: Dialect, body: dict[str, Any]) -> ModelTurn:
    pending = await session.open_answer(dialect.parse_request({"model": "m", **body}, {}))
    turn = await pending.task
    session.close_answer(pending, delivered=True)
    return turn


def chat_image(image: ImagePart) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": to_wire(image)}}


def source(image: ImagePart) -> dict[str, Any]:
    data = base64.b64encode(image.data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def chat(call_id: str) -> list[dict[str, Any]]:
    user = {"role": "user", "content": [{"type": "text", "text": "what is"}, chat_image(ONE)]}
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    bodies: list[dict[str, Any]] = [{"messages": [user], "tools": [tool]}]
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    shown = {"role": "user", "content": [chat_image(TWO), {"type": "text", "text": "it shows"}]}
    result = {"role": "tool", "tool_call_id": call_id, "content": "see"}
    return [*bodies, {"messages": [user, answer, result, shown], "tools": [tool]}]


def messages(call_id: str) -> list[dict[str, Any]]:
    user = {"role": "user", "content": [{"type": "text", "text": "what is"}, source(ONE)]}
    tool = {"name": "look", "input_schema": SCHEMA}
    answer = {"role": "assistant", "content": [{"type": "tool_use", "id": call_id, "name": "look", "input": {}}]}
    content = [{"type": "text", "text": "it shows"}, source(TWO)]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": content}]}
    common = {"max_tokens": 100, "tools": [tool]}
    return [{"messages": [user], **common}, {"messages": [user, answer, result], **common}]


def responses(call_id: str) -> list[dict[str, Any]]:
    first = {"type": "input_image", "image_url": to_wire(ONE)}
    user = {"role": "user", "content": [{"type": "input_text", "text": "what is"}, first]}
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    call = {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"}
    content = [{"type": "input_text", "text": "it shows"}, {"type": "input_image", "image_url": to_wire(TWO)}]
    result = {"type": "function_call_output", "call_id": call_id, "output": content}
    return [{"input": [user], "tools": [tool]}, {"input": [user, call, result], "tools": [tool]}]


@pytest.mark.parametrize(
    ("dialect", "bodies"),
    [(ChatDialect(), chat), (MessagesDialect(), messages), (ResponsesDialect(), responses)],
    ids=["chat", "messages", "responses"],
)
async def test_images_of_users_and_tools_are_one_row(dialect: Dialect, bodies: Any) -> None:
    session = open_session(CALL, "A cat.<|im_end|>")
    first = await ask(session, dialect, bodies("")[0])
    await ask(session, dialect, bodies(first.answer.calls[0].id)[1])
    generator = session.model.generator
    assert isinstance(generator, Looking)
    assert generator.seen == [(ONE,), (ONE, TWO)]
    rollout = await session.finish(1.0)
    assert (len(rollout.rows), rollout.num_turns, rollout.visible_images) == (1, 2, [ONE, TWO])
    assert [*rollout.prompt_ids, *rollout.response_ids][: len(generator.prompts[1])] == generator.prompts[1]
    assert all(token != PAD_ID for token, mask in zip(rollout.response_ids, rollout.response_mask, strict=True) if mask)


async def test_each_branch_has_its_images(tmp_path: Any) -> None:
    session = open_session(*(f"It is {n}.<|im_end|>" for n in range(3)))
    image = {"role": "user", "content": [chat_image(ONE), {"type": "text", "text": "what is it?"}]}
    first = {"role": "assistant", "content": "It is 0."}
    await ask(session, ChatDialect(), {"messages": [image]})
    await ask(session, ChatDialect(), {"messages": [image, first, {"role": "user", "content": [chat_image(TWO)]}]})
    await ask(session, ChatDialect(), {"messages": [image, first, {"role": "user", "content": [chat_image(ONE)]}]})
    rollout = await session.finish(1.0)
    assert [row.visible_images for row in rollout.rows] == [[ONE, TWO], [ONE, ONE]]
    assert [_fed(row) for row in rollout.rows] == session.model.generator.prompts[1:]  # type: ignore[attr-defined]
    write_jsonl(tmp_path / "a.jsonl", [rollout])
    [read] = read_jsonl(tmp_path / "a.jsonl")
    assert read.contexts == rollout.contexts


def _fed(row: Trajectory) -> list[int]:
    """What the model was fed for the last turn of a row."""
    last = row.response[-1]
    return [*row.prompt_ids, *row.response_ids][: -len(last.tokens)]


@pytest.mark.parametrize(
    ("session", "content", "match"),
    [
        (open_session(reads=False), [chat_image(ONE)], "the model reads text only"),
        (open_session(), [chat_image(WIDE)], "600 pixels are too wide"),
        (open_session(), [chat_image(BROKEN)], "cannot be decoded: image file is truncated"),
        (open_session(max_images=1), [chat_image(ONE), chat_image(TWO)], "at most 1"),
        (open_session(), [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}], "data URI"),
    ],
)
async def test_what_the_model_is_not_fed(session: AgentSession, content: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        await ask(session, ChatDialect(), {"messages": [{"role": "user", "content": content}]})


async def test_text_that_looks_like_an_image_is_text() -> None:
    session = open_session("fine<|im_end|>")
    content = [chat_image(ONE), {"type": "text", "text": PLACEHOLDER}]
    await ask(session, ChatDialect(), {"messages": [{"role": "user", "content": content}]})
    assert (await session.finish()).visible_images == [ONE]
    system = {"role": "system", "content": PLACEHOLDER}
    with pytest.raises(RequestError, match="places for images"):
        await ask(open_session(), ChatDialect(), {"messages": [system, {"role": "user", "content": "x"}]})
    drawn = {"role": "assistant", "content": [chat_image(ONE)]}
    with pytest.raises(RequestError, match="assistant"):
        await ask(open_session(), ChatDialect(), {"messages": [{"role": "user", "content": "x"}, drawn]})


async def test_a_model_that_writes_a_part_of_an_image_is_a_failed_engine() -> None:
    session = open_session("<|image_pad|><|im_end|>")
    with pytest.raises(Exception, match="part of an image"):
        await ask(session, ChatDialect(), {"messages": [{"role": "user", "content": "x"}]})
    assert "part of an image" in (session.engine_failure or "")
