"""Images of requests: from what a client sends to parts, checked and decoded once beside the event loop.

A data URI holds the image. An ``http`` address is fetched only where the service allows it, and then as the tool
``web_page`` fetches pages: from public addresses only, redirects included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from eval_service.openai.errors import bad_request, from_fault
from verl_tool.agent_loop.rollout import all_or_none
from verl_tool.content.parts import LIMITS, ContentLimits, ImagePart, from_wire, read_media
from verl_tool.errors import ContentError, ToolFault
from verl_tool.web.page_client import IMAGES, PageClient, PageUnavailableError

FETCH_SECONDS = 20.0
"""For one image, redirects included."""
FETCHES_AT_A_TIME = 16
MAX_PIXELS = 8 * LIMITS.image_pixels
"""Of all images of a request together; three bytes each while one is decoded."""
DECODING_THREADS = 2
INVALID = "invalid_image"

_decoding = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="image-decoding")


@dataclass(frozen=True)
class SentImage:
    url: str
    """A data URI or an address."""
    where: str
    """The field of the request that holds it."""


class ImageReader:
    """Reads the images of requests. `most`: images of a request; `fetches`: whether addresses are fetched at all."""

    def __init__(
        self,
        *,
        most: int = LIMITS.media,
        fetches: bool = False,
        limits: ContentLimits = LIMITS,
    ) -> None:
        self._most, self._limits = most, limits
        self._client = None
        if fetches:
            self._client = PageClient(
                user_agent="verl-tool",
                max_bytes=limits.image_bytes,
                max_concurrent=FETCHES_AT_A_TIME,
                max_per_host=FETCHES_AT_A_TIME,
                wanted=IMAGES,
            )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def read(self, sent: Sequence[SentImage]) -> tuple[ImagePart, ...]:
        """The images, in their order. Raises HttpError 400 that names the image, what is wrong with it and the limit,
        and 503 if this machine has no network."""
        if len(sent) > self._most:
            words = f"{len(sent)} images in one request; this service takes at most {self._most}: send fewer"
            raise bad_request(words, param="messages", code="too_many_images")
        fetched = await self._all_fetched(sent)
        images: list[ImagePart] = []
        for each, data in zip(sent, fetched, strict=True):
            images.append(await asyncio.get_running_loop().run_in_executor(_decoding, self._part, each, data))
            self._reject_too_much(images)
        return tuple(images)

    async def _all_fetched(self, sent: Sequence[SentImage]) -> list[bytes | None]:
        """As `_fetched`, of each; given up as soon as they are too large together."""
        total = 0

        async def one(image: SentImage) -> bytes | None:
            nonlocal total
            data = await self._fetched(image)
            total += len(data or b"")
            self._reject_above("bytes", total, self._limits.media_bytes)
            return data

        return await all_or_none([asyncio.ensure_future(one(each)) for each in sent])

    async def _fetched(self, image: SentImage) -> bytes | None:
        """What an address leads to; None of a data URI."""
        if image.url[:5].lower() == "data:":
            return None
        if image.url[:7].lower() != "http://" and image.url[:8].lower() != "https://":
            words = f"{image.url[:40]!r} is no data URI; send data:image/png;base64,…"
            raise bad_request(f"'{image.where}': {words}", param=image.where, code=INVALID)
        if self._client is None:
            words = "this service fetches no addresses; send a data URI, or start it with --allow_image_urls"
            raise bad_request(f"'{image.where}': {words}", param=image.where, code="image_url_not_allowed")
        try:
            return (await self._client.get(image.url, FETCH_SECONDS)).body
        except PageUnavailableError as error:
            words = f"{image.url[:200]!r} was not read: {error}"
            raise bad_request(f"'{image.where}': {words}", param=image.where, code="invalid_image_url") from None
        except ToolFault as fault:
            raise from_fault(fault.as_fault()) from fault

    def _part(self, image: SentImage, data: bytes | None) -> ImagePart:
        """The image, which has been decoded once. Takes tens of milliseconds."""
        try:
            part = from_wire(image.url, self._limits) if data is None else read_media(data, self._limits)
            if not isinstance(part, ImagePart):
                raise ContentError(f"it is {part.media_type}; send an image")
            part.decode()
        except ContentError as error:
            raise bad_request(f"'{image.where}': {error}", param=image.where, code=INVALID) from None
        return part

    def _reject_too_much(self, images: Sequence[ImagePart]) -> None:
        self._reject_above("bytes", sum(len(image.data) for image in images), self._limits.media_bytes)
        self._reject_above("pixels", sum(image.width * image.height for image in images), MAX_PIXELS)

    def _reject_above(self, unit: str, total: int, most: int) -> None:
        if total > most:
            words = f"images of {total} {unit} in one request; this service takes at most {most}: send smaller ones"
            raise bad_request(words, param="messages", code="images_too_large")
