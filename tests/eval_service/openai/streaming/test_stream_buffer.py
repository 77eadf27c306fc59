"""Many writers, one reader."""

from __future__ import annotations

import asyncio

from eval_service.openai.streaming.stream_buffer import StreamBuffer


async def test_the_reader_gets_all_in_order_and_then_the_end() -> None:
    box = StreamBuffer()

    async def write() -> None:
        for i in range(100):
            await box.put(b"%d " % i)
            if i % 7 == 0:
                await asyncio.sleep(0)
        box.close()

    writing = asyncio.create_task(write())
    parts = []
    while part := await asyncio.wait_for(box.take(), 5):
        parts.append(part)
    await writing
    assert b"".join(parts) == b"".join(b"%d " % i for i in range(100))
    assert await box.take() == b""


async def test_writers_wait_while_the_box_is_full() -> None:
    box = StreamBuffer(max_bytes=10)
    await box.put(b"x" * 10)
    writing = asyncio.create_task(box.put(b"y"))
    await asyncio.sleep(0.02)
    assert not writing.done()
    assert await box.take() == b"x" * 10 + b"y"
    await asyncio.wait_for(writing, 5)


async def test_a_box_that_is_closed_still_gives_what_it_holds() -> None:
    box = StreamBuffer()
    await box.put(b"a")
    box.close()
    assert await box.take() == b"a"
    assert await box.take() == b""
