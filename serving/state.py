"""Small shared facts that outlive a request: JSON values under string keys, each with an expiry.

Nothing that a token waits for lives here, so a slow or absent store never slows a stream.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Value = Mapping[str, Any]


class StateStore(Protocol):
    """Memory in one process, Redis across several. Values are JSON objects, copied in and out."""

    async def get(self, key: str) -> Value | None:
        """None when there is no such key, or no longer."""
        ...

    async def set(self, key: str, value: Value, ttl_s: float) -> None: ...

    async def delete(self, key: str) -> None:
        """Idempotent."""
        ...

    async def scan(self, prefix: str) -> dict[str, Value]:
        """Every living key that starts with ``prefix``."""
        ...

    async def close(self) -> None:
        """The last call."""
        ...


class MemoryStore:
    """A bounded dictionary: the oldest entries make room for new ones."""

    def __init__(
        self, max_entries: int = 10_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, Value]] = OrderedDict()  # oldest set first

    async def get(self, key: str) -> Value | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        expires_at, value = entry
        if expires_at <= self._clock():
            del self._entries[key]
            return None
        return dict(value)

    async def set(self, key: str, value: Value, ttl_s: float) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + ttl_s, dict(value))
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    async def delete(self, key: str) -> None:
        self._entries.pop(key, None)

    async def close(self) -> None:
        """Nothing to let go of."""

    def living(self) -> dict[str, tuple[float, Value]]:
        """Everything with the seconds that it has left, oldest first."""
        now = self._clock()
        return {
            key: (expires_at - now, dict(value))
            for key, (expires_at, value) in self._entries.items()
            if expires_at > now
        }

    async def scan(self, prefix: str) -> dict[str, Value]:
        now = self._clock()
        return {
            key: dict(value)
            for key, (expires_at, value) in self._entries.items()
            if key.startswith(prefix) and expires_at > now
        }
