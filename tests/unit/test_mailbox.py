"""A queue for one reader: order, waiting, and readers that give up."""

import asyncio

import pytest

from serving.mailbox import Mailbox


async def test_items_come_in_order_whether_they_were_waited_for_or_not() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    box.put(2)
    assert [await box.get(), await box.get()] == [1, 2]
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(3)
    box.put(4)
    assert [await waiting, await box.get()] == [3, 4]


async def test_a_reader_that_gives_up_takes_nothing_away() -> None:
    box: Mailbox[str] = Mailbox()
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put("kept")  # at the same moment
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await box.get() == "kept"


async def test_only_one_may_wait() -> None:
    box: Mailbox[int] = Mailbox()
    first = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="somebody waits"):
        await box.get()
    box.put(5)
    assert await first == 5
