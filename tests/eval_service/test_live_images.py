"""The endpoint over vLLM, a real tiny vision model and a tool that answers with images, as clients see it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live_server import LiveServers, serve_asgi

openai = pytest.importorskip("openai")
torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import transformers  # noqa: E402
from looking_model import CALLS, HALF, OPTIONS, Look, looks, make_image_processor, prepare, two_colours  # noqa: E402

from eval_service.deployment import make_engine  # noqa: E402
from eval_service.model.images import image_reading  # noqa: E402
from eval_service.model.tokenizer import load_tokenizer  # noqa: E402
from eval_service.openai.endpoint import Endpoint  # noqa: E402
from eval_service.openai.image_reader import ImageReader  # noqa: E402
from eval_service.service import Service  # noqa: E402
from eval_service.settings import Sampling, ServiceSettings  # noqa: E402
from verl_tool.agent_loop.generators.qwen_images import QwenImages  # noqa: E402
from verl_tool.agent_loop.options import EpisodeOptions  # noqa: E402
from verl_tool.agent_loop.tokenizer import HFTokenizer  # noqa: E402
from verl_tool.agent_loop.trajectory import Trajectory  # noqa: E402
from verl_tool.client import ToolClient  # noqa: E402
from verl_tool.content.parts import ImagePart, encode_image, from_wire, to_wire  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.timeout(1500),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM reads images with torchvision"),
]

NAME = "qwen3-vl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("looking"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(model: Path) -> AsyncIterator[str]:
    """Where the model answers, in this process but for vLLM's own."""
    servers = LiveServers()
    tool_server = await servers.start(load_tools(str(HALF)))
    options = EpisodeOptions.load(OPTIONS | {"tool_server_url": tool_server.url})
    settings = ServiceSettings(model=str(model), served_model_name=NAME, options=options)
    tokenizer = load_tokenizer(settings.model)
    images, _ = image_reading(settings, tokenizer)
    engine = await make_engine(settings, tokenizer, images)
    async with ToolClient(tool_server.url) as tools:
        service = Service(
            *(engine, tokenizer, tools, options),
            sampling=Sampling(temperature=0),
            image_tokens=images,
            image_reader=ImageReader(most=4),
        )
        address, server, task = await serve_asgi(Endpoint(service, NAME))
        yield address
        server.should_exit = True
        await task
        await service.aclose()
    await engine.close()
    await servers.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as made:
        yield made


def request(look: Look, **fields: Any) -> dict[str, Any]:
    """As a client asks."""
    messages = look.told(lambda image: {"type": "image_url", "image_url": {"url": to_wire(image)}})
    return {"model": NAME, "messages": messages, **fields}


def observed(look: Look) -> list[ImagePart]:
    """The images with which the tool answers."""
    if not look.images:
        return []
    image = look.images[look.question == "second?"].decode()
    boxes = ((0, 0, image.width >> n, image.height) for n in range(1, len(look.turns)))
    return [encode_image(image.crop(box)) for box in boxes]


async def test_the_client_is_answered_by_what_the_images_show(client: Any) -> None:
    asked = list(islice(looks(1), 24))
    assert {look.question for look in asked} == {*CALLS, "hello?"}
    assert any(look.earlier for look in asked)
    extra = {"return_trajectory": True}
    answers = await asyncio.gather(
        *(client.chat.completions.create(**request(look, extra_body=extra)) for look in asked)
    )
    for look, answer in zip(asked, answers, strict=True):
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == (look.turns[-1], "stop")
        trajectory = Trajectory.from_json(json.dumps(choice.trajectory))
        assert [call.action for call in trajectory.calls] == list(look.turns[:-1])
        shown = [*look.images, *observed(look)]
        assert [segment.image for segment in trajectory.segments if segment.image] == [i.sha256 for i in shown]
        assert {from_wire(uri) for uri in choice.model_extra.get("images", {}).values()} == set(observed(look))


async def test_a_stream_is_the_same_with_the_images_that_the_tool_gave(client: Any) -> None:
    for look in (Look("twice?", (two_colours("blue", "red"),), (*CALLS["twice?"], "blue")), next(looks(2))):
        stream = await client.chat.completions.create(**request(look, stream=True))
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(delta.content or "" for delta in deltas) == "".join(look.turns)
        messages = [message for delta in deltas for message in getattr(delta, "tool_messages", None) or ()]
        urls = [part["image_url"]["url"] for m in messages for part in m["content"] if part["type"] == "image_url"]
        assert [from_wire(url) for url in urls] == observed(look)


async def test_the_readme_s_requests_with_an_image_run_as_written(url: str, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "eval_service/README.md").read_text()
    section = text.partition("\n## Images\n")[2].partition("\n## ")[0]
    shell, python = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)[-1] for kind in ("bash", "python"))
    assert NAME in shell
    (tmp_path / "picture.png").write_bytes(two_colours("red", "blue").data)
    environment = {**os.environ, "BASE_URL": f"{url}/v1"}
    printed = []
    for command in (["bash", "-c", shell], [sys.executable, "-c", python]):
        pipe = asyncio.subprocess.PIPE
        run = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe)
        output, errors = await run.communicate()
        assert run.returncode == 0, errors.decode()
        printed.append(output.decode())
    answer = json.loads(printed[0])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] > 4
    assert printed[1].startswith("model ")


async def test_log_probs_are_those_of_the_model_itself(client: Any, model: Path) -> None:
    """The model, asked anew about every position with the images that the trajectory says it saw, gives the same."""
    looker = transformers.Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    images = QwenImages(make_image_processor(), HFTokenizer(transformers.AutoTokenizer.from_pretrained(model)))
    greatest = 0.0
    for look in islice(looks(3), 8):
        answer = await client.chat.completions.create(
            **request(look, temperature=1.0, seed=7, logprobs=True, extra_body={"return_trajectory": True})
        )
        told = Trajectory.from_json(json.dumps(answer.choices[0].trajectory))
        sent = {image.sha256: image for image in look.images}
        sent |= {name: from_wire(uri) for name, uri in answer.choices[0].model_extra.get("images", {}).items()}
        shown = [sent[segment.image].decode() for segment in told.segments if segment.image]
        ids = torch.tensor([told.prompt_ids + told.response_ids])
        kinds = (ids == images.pad_id).int()
        features = {**images.features(shown), "mm_token_type_ids": kinds} if shown else {}
        with torch.no_grad():
            logits = looker(input_ids=ids, **features).logits[0, len(told.prompt_ids) - 1 : -1]
        logits[:, list(images.banned_ids)] = -torch.inf
        exact = logits.log_softmax(-1)
        assert told.response_log_probs is not None
        for i, (token, mask) in enumerate(zip(told.response_ids, told.response_mask, strict=True)):
            if mask:
                greatest = max(greatest, abs(told.response_log_probs[i] - exact[i, token].item()))
    assert greatest < 1e-4


@pytest.mark.parametrize(
    ("images", "code"),
    [
        (["data:image/png;base64,iVBORw0KGgo="], "invalid_image"),
        (["http://127.0.0.1/a.png"], "image_url_not_allowed"),
        ([to_wire(two_colours("red", "blue"))] * 5, "too_many_images"),
    ],
)
async def test_what_cannot_be_read_is_refused(client: Any, images: list[str], code: str) -> None:
    urls = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": urls}])
    assert raised.value.code == code
