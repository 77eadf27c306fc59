"""Images in chats, as OpenAI's own client sends them: what the model sees, what is streamed, and what is refused."""

from __future__ import annotations

import base64
import json
import os
import threading
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from live_endpoint import MODEL, LiveEndpoint, live_endpoint
from PIL import Image
from recordings import ramp
from search_providers import Pages
from test_endpoint import client_of, post
from toy_images import PAD, PLACEHOLDER
from toy_tools import picture

from eval_service.openai.image_reader import ImageReader
from eval_service.openai.requests import EXTRA_BYTES
from verl_tool.agent_loop.trajectory import Author, Trajectory
from verl_tool.content.parts import ContentLimits, ImagePart, encode_image, from_wire, to_wire
from verl_tool.web.addresses import anything

openai = pytest.importorskip("openai")

ONE, TWO = picture(1, (8, 2)), picture(2, (5, 2))
HALF, QUARTER = picture(1, (4, 2)), picture(1, (2, 2))
TOOL = __file__.replace("openai/test_image_reader.py", "data/half.py")
CALL = "<half>1</half>"
CHAT = {"enable_mtrl": True, "mtrl_role": "tool", "action_stop_tokens": ["</half>"]}


def halves_twice(text: str) -> str:
    return CALL if text.count(CALL) < 2 else "seen"


def asks(*images: ImagePart | str, text: str = "What is it?") -> list[dict[str, Any]]:
    urls = [image if isinstance(image, str) else to_wire(image) for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def looks(reader: ImageReader | None = None, **options: Any) -> Any:
    options = {"options": CHAT, **options}
    return live_endpoint(halves_twice, tools=TOOL, image_reader=reader or ImageReader(), **options)


async def refusal(live: LiveEndpoint, messages: Any) -> tuple[int, str, str]:
    status, body = await post(live, "/v1/chat/completions", {"model": MODEL, "messages": messages})
    return status, body["error"]["code"], body["error"]["message"]


async def test_a_model_sees_the_images_of_the_chat_and_of_its_tools() -> None:
    async with looks() as live:
        answer = await client_of(live).chat.completions.create(
            model=MODEL, messages=asks(TWO, ONE, TWO), extra_body={"return_trajectory": True}
        )
        two = picture(2, (2, 2))
        assert live.engine.seen == [[TWO, ONE, TWO], [TWO, ONE, TWO, two], [TWO, ONE, TWO, two, picture(2, (1, 2))]]
    choice = answer.choices[0]
    assert (choice.message.content, choice.stop_reason) == ("seen", "answered")
    trajectory = Trajectory.from_json(json.dumps(choice.trajectory))
    shown = [segment.image for segment in trajectory.segments if segment.image]
    assert shown == [image.sha256 for image in live.engine.seen[-1]]
    assert {name: from_wire(uri) for name, uri in choice.images.items()} == {
        image.sha256: image for image in live.engine.seen[-1][3:]
    }, "what the client sent it has"
    assert answer.usage.prompt_tokens == len(trajectory.prompt_ids)
    assert sum(len(s.tokens) for s in trajectory.segments if s.image and s.author is Author.PROMPT) == 18 + 6


async def test_a_stream_shows_the_images_of_observations_as_parts() -> None:
    async with looks() as live:
        stream = await client_of(live).chat.completions.create(model=MODEL, messages=asks(ONE), stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    messages = [m for delta in deltas for m in (getattr(delta, "tool_messages", None) or ())]
    assert [(m["role"], m["content"][1]["type"]) for m in messages] == [("tool", "image_url")] * 2
    assert "half: " in messages[0]["content"][0]["text"]
    assert [from_wire(m["content"][1]["image_url"]["url"]) for m in messages] == [HALF, QUARTER]
    assert "".join(delta.content or "" for delta in deltas) == CALL + CALL + "seen"


async def test_a_chat_without_images_is_as_ever() -> None:
    async with live_endpoint(lambda text: "fine", image_reader=ImageReader(), options=CHAT) as live:
        answer = await client_of(live).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "<image> what is it?"}]
        )
        assert live.engine.seen == [[]]
    assert answer.choices[0].message.content == "fine"


async def test_a_model_of_text_refuses_an_image_by_name() -> None:
    async with live_endpoint() as live:
        status, code, message = await refusal(live, asks("data:image/png;base64,AAAA"))
        assert (status, code) == (400, "image_not_supported")
        assert message.startswith(f"'messages.0.content.0' is an image, and the model '{MODEL}' reads text only")
        assert live.engine.seen == []


def bomb() -> str:
    """A PNG of 10,000 x 10,000 pixels in some bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = (10_000).to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00"
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100_000)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        (uri(picture(3, (90, 90)).data[:90]), "invalid_image", "cannot be decoded"),
        (uri(b"GIF89a"), "invalid_image", "begins with b'GIF89a' is no image or audio that is known; taken are"),
        (uri(b"fLaC" + b"\0" * 20), "invalid_image", "says image and holds audio/flac; say which it is"),
        (bomb(), "invalid_image", "of 10000 x 10000 pixels; at most 16777216 are taken"),
        ("data:image/png;base64,?", "invalid_image", "is not base64"),
        ("file:///etc/passwd", "invalid_image", "is no data URI; send data:image/png;base64"),
        (to_wire(picture(1, (501, 1))), "invalid_image", "501 pixels are too wide"),
        ("http://127.0.0.1:9/a.png", "image_url_not_allowed", "start it with --allow_image_urls"),
        (uri(b"\x89PNG\r\n\x1a\n" + b"\0" * (9 << 20)), "invalid_image", "at most 8388608 are taken"),
    ],
)
async def test_what_is_no_image_says_why(url: str, code: str, words: str) -> None:
    async with looks() as live:
        status, told, message = await refusal(live, asks(ONE, url))
        assert (status, told) == (400, code)
        assert words in message
        assert live.engine.seen == []
        answer = await client_of(live).chat.completions.create(model=MODEL, messages=asks(ONE))
    assert answer.choices[0].message.content == "seen"


async def test_limits_of_a_request() -> None:
    limits = ContentLimits(media_bytes=len(ONE.data) * 2)
    async with looks(ImageReader(most=3, limits=limits)) as live:
        status, code, message = await refusal(live, asks(*[TWO] * 4))
        assert (status, code) == (400, "too_many_images")
        assert message == "4 images in one request; this service takes at most 3: send fewer"
        status, code, message = await refusal(live, asks(*[ONE] * 3))
        assert (status, code) == (400, "images_too_large")
        assert f"at most {2 * len(ONE.data)}" in message
    async with looks(max_model_len=60) as live:
        status, code, message = await refusal(live, asks(picture(1, (100, 1))))
        assert (status, code) == (400, "context_length_exceeded")
        assert "1 image(s) included; this model takes at most 59" in message


async def test_tokens_of_images_cannot_be_written_as_text() -> None:
    async with looks() as live:
        for text in (PLACEHOLDER, PAD, f"a{PLACEHOLDER}{PLACEHOLDER}"):
            status, code, message = await refusal(live, asks(ONE, text=text))
            assert (status, code) == (400, "invalid_image")
            assert f"the prompt has {1 + text.count(PAD)} places for images" in message
        status, body = await post(live, "/v1/completions", {"model": MODEL, "prompt": f"{PLACEHOLDER}?"})
        assert (status, body["error"]["code"]) == (400, "invalid_image")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "'input_audio' is not carried here"),
        ({"type": "image_url", "image_url": {"url": "data:", "detail": "low"}}, "detail' is 'low'"),
        ({"type": "image_url"}, "'messages.0.content.parts.0.image_url.image_url' is missing"),
    ],
)
async def test_other_parts_are_refused(part: Any, words: str) -> None:
    async with looks() as live:
        status, body = await post(
            live, "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
        )
    assert status == 400
    assert words in body["error"]["message"]


async def test_audio_of_a_tool_is_refused_by_the_tools_name() -> None:
    call = '<tool_call>{"name": "audio_crop", "arguments": {"start": 0, "end": 1}}</tool_call>'
    options = {"enable_mtrl": True, "mtrl_role": "tool", "action_stop_tokens": ["</tool_call>"]}
    large = {"audios": [to_wire(ramp(200.0))]}
    assert len(large["audios"][0]) > EXTRA_BYTES, "which is for what goes with every call"
    async with live_endpoint(lambda text: call, tools="audio_crop", options=options) as live:
        status, body = await post(
            live,
            "/v1/chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "extra_fields": large},
        )
    assert status == 500
    assert "the tool 'audio_crop' answered with audio, and this loop carries text only" in body["error"]["message"]


class TestAddresses:
    @pytest.fixture
    async def pages(self) -> AsyncIterator[Pages]:
        files = {
            "one.png": (ONE.data, "image/png"),
            "octets": (ONE.data, "application/octet-stream"),
            "large.png": (ONE.data + bytes(9 << 20), "image/png"),
        }
        async with Pages(files) as made:
            yield made

    async def test_public_ones_are_fetched_where_that_is_allowed(self, pages: Pages) -> None:
        reader = ImageReader(fetches=True)
        assert reader._client is not None
        reader._client._allowed = anything  # as if the test's own server were public
        async with looks(reader) as live:
            url = f"{pages.url}/one.png"
            answer = await client_of(live).chat.completions.create(model=MODEL, messages=asks(url, TWO))
            assert live.engine.seen[0] == [ONE, TWO]
            for path, words in {
                "none": "HTTP 404",
                "article": "it is text/html; only images can be read",
                "to?where=file:///etc/passwd": "begins with http",
                "bomb": "only images can be read",
                "octets": "it is application/octet-stream; only images can be read",
                "large.png": "it is larger than 8192 KB",
            }.items():
                status, code, message = await refusal(live, asks(f"{pages.url}/{path}"))
                assert (status, code) == (400, "invalid_image_url"), path
                assert words in message
        assert answer.choices[0].message.content == "seen"

    async def test_all_of_a_request_together_are_bounded(self, pages: Pages) -> None:
        reader = ImageReader(fetches=True, limits=ContentLimits(media_bytes=len(ONE.data) * 2))
        assert reader._client is not None
        reader._client._allowed = anything
        async with looks(reader) as live:
            status, code, message = await refusal(live, asks(*[f"{pages.url}/one.png?{n}" for n in range(40)]))
        assert (status, code) == (400, "images_too_large")
        assert f"at most {2 * len(ONE.data)}" in message
        assert len(pages.asked) < 40, "what was not begun is not fetched"

    async def test_private_ones_and_redirects_to_them_are_not(self, pages: Pages) -> None:
        async with looks(ImageReader(fetches=True)) as live:
            for url in (f"{pages.url}/one.png", "http://169.254.169.254/latest", "http://[::1]/a.png"):
                status, code, message = await refusal(live, asks(url))
                assert (status, code) == (400, "invalid_image_url")
                assert "only those may be read" in message
        reader = ImageReader(fetches=True)
        assert reader._client is not None
        reader._client._allowed = lambda address: str(address) == "127.0.0.1"
        async with looks(reader) as live:
            url = f"{pages.url}/to?where=http://127.0.0.2/one.png"
            status, code, message = await refusal(live, asks(url))
        assert (status, code) == (400, "invalid_image_url")
        assert "only those may be read" in message
        assert pages.asked == ["to"]


async def test_images_are_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    decode = ImagePart.decode

    def noted(self: ImagePart) -> Any:
        threads.append(threading.current_thread())
        return decode(self)

    monkeypatch.setattr(ImagePart, "decode", noted)
    async with live_endpoint(lambda text: "fine", image_reader=ImageReader(), options=CHAT) as live:
        await client_of(live).chat.completions.create(model=MODEL, messages=asks(ONE))
    assert threads
    assert threading.main_thread() not in threads


async def test_a_request_of_tens_of_megabytes_is_read() -> None:
    large = encode_image(Image.frombytes("RGB", (1200, 1200), os.urandom(1200 * 1200 * 3)))
    async with looks() as live:
        body = json.dumps({"model": MODEL, "messages": asks(*[large] * 6)}).encode()
        assert len(body) > 30 << 20
        status, answer = await post(live, "/v1/chat/completions", body)
    assert status == 400
    assert "1200 pixels are too wide" in answer["error"]["message"]
