"""A queue for one reader: what every token passes through, so it does little.

``asyncio.Queue`` does the same for any number of readers, with room that may run out, and takes
three times as long.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """``put`` from anywhere on the event loop; one task at a time may ``get``."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled: asyncio.Future[None] | None = None  # while somebody waits

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._filled is not None and not self._filled.done():
            self._filled.set_result(None)

    async def get(self) -> T:
        """The oldest item, once there is one. A reader that is cancelled takes none away."""
        if not self._items:
            assert self._filled is None, "somebody waits already"
            self._filled = asyncio.get_running_loop().create_future()
            try:
                await self._filled
            finally:
                self._filled = None
        return self._items.popleft()
