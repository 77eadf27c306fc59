"""An image crosses the wire once in a trajectory, whatever is sent again, to whom, and whoever goes on from it."""

from __future__ import annotations

import json
from collections import deque

from live_server import LiveServers, serve_asgi
from saboteur import DROP_AFTER, HALF, Saboteur
from starlette.types import Receive, Scope, Send
from toy_tools import Ledger, Puppet, picture

from verl_tool.client import ToolClient
from verl_tool.client.media_store import MediaStore, read_media_of
from verl_tool.content.parts import ImagePart, TextPart, parts_of, read_media, to_wire
from verl_tool.protocol import MAX_KNOWN_MEDIA, StepRequest, StepResult

SOUND = read_media(b"fLaC" + b"\0" * 20)


def see(*reds: int) -> str:
    return f"<puppet>pictures {' '.join(map(str, reds))}</puppet>"


def known(body: dict[str, list[list[str]]]) -> list[list[str]]:
    return body.get("known_media", [])


class TestOnce:
    async def test_bytes_come_once_and_the_name_afterwards(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url) as client:
            first = await client.call("t", see(1, 2), step=0)
            again = await client.call("t", see(2, 3), step=1)
            other = await client.call("u", see(1), step=0)
        assert first.image == [picture(1), picture(2)]
        assert again.image == [picture(2), picture(3)]
        assert again.image[0] is first.image[1] is picture(2), "held once"
        assert other.image == [picture(1)]
        assert [known(body) for body in proxy.bodies] == [[], [[picture(n).sha256 for n in (1, 2)]], []]

    async def test_what_is_known_is_only_named(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet()])
        request = StepRequest("t", see(1, 2), 0, known_media=[picture(1).sha256])
        async with ToolClient(server.url) as client:
            [result] = await client.step([request])
        assert result.image == [f"sha256:{picture(1).sha256}", picture(2)], "the caller said that it has it"

    async def test_a_lost_answer_comes_again_whole(self, servers: LiveServers) -> None:
        puppet = Puppet()
        server = await servers.start([puppet])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url, retry_delay=0.01) as client:
            proxy.plan = deque([DROP_AFTER, HALF])
            assert (await client.call("t", see(1), step=0)).image == [picture(1)]
            proxy.plan = deque([DROP_AFTER])
            assert (await client.call("t", see(1), step=1)).image == [picture(1)]
            assert (await client.call("t", see(1), step=0)).image == [picture(1)], "of a step before it was known"
        assert puppet.runs == ["pictures 1"] * 2

    async def test_a_fork_has_what_its_source_has_and_an_end_forgets(self, servers: LiveServers) -> None:
        server = await servers.start([Puppet(), Ledger()])
        async with Saboteur(server.url) as proxy, ToolClient(proxy.url) as client:
            await client.call("t", see(1) + "<ledger>x</ledger>", step=0)
            await client.fork("t", "u")
            assert (await client.call("u", see(1), step=1)).image == [picture(1)]
            await client.finish(["u"])
            assert (await client.call("v", see(1), step=0)).image == [picture(1)]
            assert client._media.held_by("u") == {}
        assert [known(body) for body in proxy.bodies if body.get("actions") == [see(1)]] == [[[picture(1).sha256]], []]


class TestOtherServers:
    async def test_verl_tools_own_answers_are_read(self) -> None:
        one, two = to_wire(picture(1)), to_wire(picture(2))
        answers = [
            {"obs": "a <image> b", "image": one},
            {"obs": "<image><image>", "image": [one, two]},
            {"obs": "heard", "audio": to_wire(SOUND)},
            {"obs": "far", "image": "https://example.org/a.png"},
        ]

        async def older(scope: Scope, receive: Receive, send: Send) -> None:
            while scope["type"] == "lifespan":
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
            found = scope["path"] == "/get_observation"
            body = {"observations": answers, "dones": [False] * 4, "valids": [True] * 4} if found else {}
            await send({"type": "http.response.start", "status": 200 if found else 404, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(body).encode()})

        url, server, task = await serve_asgi(older)
        try:
            async with ToolClient(url) as client:
                results = await client.step([StepRequest(f"t{i}", "x", 0) for i in range(4)])
        finally:
            server.should_exit = True
            await task
        parts = [parts_of(result.observation, result.image, result.audio) for result in results[:3]]
        assert parts == [
            [TextPart("a "), picture(1), TextPart(" b")],
            [picture(1), picture(2)],
            [TextPart("heard"), SOUND],
        ]
        assert results[3].image == "https://example.org/a.png", "it is left for whoever looks at it to refuse"


class TestBounds:
    def test_the_trajectory_that_was_idle_for_longest_is_forgotten(self) -> None:
        size = len(picture(1).data)
        store = MediaStore(max_bytes=3 * size)
        for name, red in (("a", 1), ("b", 2), ("a", 3), ("c", 1)):
            store.keep(StepResult(name, image=[picture(red)]))
        assert {name: len(store.held_by(name)) for name in "abc"} == {"a": 2, "b": 0, "c": 1}
        store.forget("a")
        store.keep(StepResult("c", image=[picture(1), "no part"]))
        store.fork("c", "d")
        assert list(store.held_by("d")) == [picture(1).sha256]
        assert store._bytes == 2 * size

    def test_a_request_names_no_more_than_it_may(self) -> None:
        store = MediaStore()
        pictures = [ImagePart(b"", "image/png", 1, 1, f"{n:064x}") for n in range(MAX_KNOWN_MEDIA + 9)]
        store.keep(StepResult("t", image=pictures))
        assert list(store.held_by("t").values()) == pictures[9:]

    async def test_much_is_read_in_a_thread_and_the_same(self) -> None:
        large = picture(1, (4, 3)), read_media(b"fLaC" + bytes(range(256)) * 400)
        came = StepResult("t", image=to_wire(large[0]), audio=[to_wire(large[1]), 3])
        read = await read_media_of(came, {})
        assert (read.image, read.audio) == ([large[0]], [large[1], 3])
