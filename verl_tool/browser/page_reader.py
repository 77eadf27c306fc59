"""Reads pages as lines of text with numbered elements, and finds the elements again.

Scripts run in a JavaScript world of their own (`Page.createIsolatedWorld`): a page neither sees nor changes them. A
number belongs to its element for as long as that lives.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.async_api import CDPSession

MAX_NODES = 20_000
"""Of one frame that are visited."""
MAX_FRAMES = 12
MAX_LISTENERS = 4000
"""A page with more is read without knowing which of its elements listen."""
_MAX_RESOLVED = 200
"""Elements that are found to listen in one reading of a frame."""
_WORLD = "verl-tool"
_GROUP = "verl-tool"
_EVENTS = {"click", "mousedown", "mouseup", "pointerdown", "pointerup", "dblclick", "touchstart"}
_OUTLINE = (Path(__file__).parent / "outline.js").read_text(encoding="utf-8")
_PREPARE = """globalThis.verlToolOutline ??= {ids: new WeakMap(), elements: new Map(), listening: new WeakSet()};"""
_LISTENING = "(...found) => found.forEach((each) => globalThis.verlToolOutline.listening.add(each))"
_FIND = "globalThis.verlToolOutline?.elements.get(%d)?.deref()"


class MissingElementError(Exception):
    """There is no such element, or no longer. The message is for the model."""


@dataclass(frozen=True)
class Outline:
    """What a page shows."""

    lines: Sequence[str]
    title: str
    above: int
    """Elements above the window, which are left out."""
    cut: bool
    """Whether more follows."""


@dataclass(frozen=True)
class FoundElement:
    """An element of a page, in the reader's world."""

    number: int
    object_id: str
    frame: str
    is_main: bool


class PageReader:
    """Reads one tab."""

    def __init__(self, cdp: CDPSession) -> None:
        self._cdp = cdp
        self._ranges: list[tuple[int, int, str]] = []
        """First number, the one after the last, and the frame whose elements have these."""
        self._main = ""
        self._listening: dict[int, set[int]] = {}
        """Nodes that are known to listen, by the world of their frame."""

    async def start(self) -> None:
        """Let chromium count the page's listeners."""
        await self._cdp.send("Performance.enable")

    async def read(self, next_number: int, max_characters: int, exclude: str = "") -> tuple[Outline, int]:
        """Read the page, and return the next free number too. `exclude`: a CSS selector of what is left out."""
        await self._cdp.send("Runtime.releaseObjectGroup", {"objectGroup": _GROUP})
        frames = _flat((await self._cdp.send("Page.getFrameTree"))["frameTree"])
        self._main = frames[0]["id"]
        shown = frames[:MAX_FRAMES]
        listening = await self._count_listeners() <= MAX_LISTENERS
        lines: list[str] = []
        title, above, cut = "", 0, len(frames) > MAX_FRAMES
        for number, frame in enumerate(shown):
            left = max_characters - sum(map(len, lines)) - len(lines)
            found = await self._read_frame(frame["id"], next_number, left, exclude, listening)
            if found is None:
                continue
            if found["next"] > next_number:
                self._ranges.append((next_number, found["next"], frame["id"]))
            next_number, cut, above = found["next"], cut or found["cut"], above + found["above"]
            if number == 0:
                title = found["title"]
            elif found["lines"]:
                lines.append(f"frame {json.dumps(frame['url'][:100])}")
            lines += found["lines"]
        return Outline(lines, title, above, cut), next_number

    async def find(self, number: int) -> FoundElement:
        """Raises MissingElementError."""
        frame = next((frame for first, end, frame in reversed(self._ranges) if first <= number < end), None)
        if frame is not None:
            try:
                world = await self._world(frame)
                found = await self._evaluate(_FIND % number, world)
            except MissingFrameError:
                found = {}
            if "objectId" in found:
                return FoundElement(number, found["objectId"], frame, frame == self._main)
        raise MissingElementError(f"there is no element [{number}] on this page")

    async def call(self, element: FoundElement, function: str, *arguments: object) -> Any:
        """Call a JavaScript function with the element as ``this``, and return its value."""
        answer = await self._cdp.send(
            "Runtime.callFunctionOn",
            {
                "functionDeclaration": function,
                "objectId": element.object_id,
                "arguments": [{"value": argument} for argument in arguments],
                "returnByValue": True,
            },
        )
        if "exceptionDetails" in answer:
            raise MissingElementError(f"element [{element.number}] cannot be used")
        return answer["result"].get("value")

    async def offset(self, element: FoundElement) -> tuple[float, float]:
        """Where the element's frame begins in the window, in pixels."""
        if element.is_main:
            return 0.0, 0.0
        owner = await self._cdp.send("DOM.getFrameOwner", {"frameId": element.frame})
        box = await self._cdp.send("DOM.getBoxModel", {"backendNodeId": owner["backendNodeId"]})
        return box["model"]["content"][0], box["model"]["content"][1]

    async def _count_listeners(self) -> float:
        metrics = (await self._cdp.send("Performance.getMetrics"))["metrics"]
        return next((each["value"] for each in metrics if each["name"] == "JSEventListeners"), 0)

    async def _read_frame(
        self, frame: str, next_number: int, max_characters: int, exclude: str, listening: bool
    ) -> Mapping[str, Any] | None:
        """None if the frame is gone meanwhile, or has no document."""
        options = {"next": next_number, "maxCharacters": max_characters, "maxNodes": MAX_NODES, "exclude": exclude}
        try:
            world = await self._world(frame)
            await self._evaluate(_PREPARE, world)
            if listening and frame == self._main:
                await self._mark_listening(world)
            found = await self._evaluate(f"({_OUTLINE})({json.dumps(options)})", world, by_value=True)
        except MissingFrameError:
            return None
        value: Mapping[str, Any] | None = found.get("value")
        return value

    async def _mark_listening(self, world: int) -> None:
        """Tell the world which elements scripts listen on: only the protocol knows."""
        document = await self._cdp.send("Runtime.evaluate", {"expression": "document", "objectGroup": _GROUP})
        object_id = document["result"].get("objectId")
        if object_id is None:
            return
        answer = await self._cdp.send("DOMDebugger.getEventListeners", {"objectId": object_id, "depth": -1})
        known = self._listening.setdefault(world, set())
        nodes = {each.get("backendNodeId") for each in answer["listeners"] if each["type"] in _EVENTS}
        new = [node for node in nodes if node and node not in known][:_MAX_RESOLVED]
        if new:
            self._listening = {world: known | set(new)}
            requests = ({"backendNodeId": n, "executionContextId": world, "objectGroup": _GROUP} for n in new)
            answers = await asyncio.gather(
                *(self._cdp.send("DOM.resolveNode", request) for request in requests), return_exceptions=True
            )
            found = [each["object"]["objectId"] for each in answers if isinstance(each, dict)]
            await self._cdp.send(
                "Runtime.callFunctionOn",
                {
                    "functionDeclaration": _LISTENING,
                    "executionContextId": world,
                    "arguments": [{"objectId": each} for each in found],
                },
            )

    async def _world(self, frame: str) -> int:
        """Raises MissingFrameError."""
        try:
            made = await self._cdp.send("Page.createIsolatedWorld", {"frameId": frame, "worldName": _WORLD})
        except Exception as error:  # the driver's own class, which is not imported here
            raise MissingFrameError(str(error)) from error
        return int(made["executionContextId"])

    async def _evaluate(self, expression: str, world: int, by_value: bool = False) -> dict[str, Any]:
        """Raises MissingFrameError."""
        request = {"expression": expression, "contextId": world, "returnByValue": by_value, "objectGroup": _GROUP}
        try:
            answer = await self._cdp.send("Runtime.evaluate", request)
        except Exception as error:  # as above
            raise MissingFrameError(str(error)) from error
        if "exceptionDetails" in answer:
            raise MissingFrameError(json.dumps(answer["exceptionDetails"])[:500])
        found: dict[str, Any] = answer["result"]
        return found


class MissingFrameError(Exception):
    """The frame was replaced or removed meanwhile."""


def _flat(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The frame of a tree, and those in it."""
    return [tree["frame"], *(frame for child in tree.get("childFrames", ()) for frame in _flat(child))]
