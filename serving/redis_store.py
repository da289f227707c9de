"""The shared state of several gateways in Redis, the only file that knows it.

Keys are ``evenflow:<namespace>:<key>``; each value is a JSON object with an expiry; nothing else is
written and nothing is deleted that we did not write. No script is needed: every operation is one
command on one key.

Nothing waits for Redis: every operation has a deadline, and after a failure none is tried for a
moment (the breaker): a frozen Redis costs one deadline and then nothing. Meanwhile, and always as
its first answer to this process's own writes, a memory store stands in. What it holds that is still
alive is written again when Redis is back, also when it came back empty.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from serving.state import MemoryStore, Value

DEADLINE_S = 0.05  # of one operation; Redis answers in well under a millisecond
CONNECT_S = 0.05
PROBE_S = 1.0  # how often a Redis that failed is tried again
MAX_CONNECTIONS = 16
MAX_VALUE_BYTES = 1 << 20
SCAN_BATCH = 500

log = logging.getLogger(__name__)
T = TypeVar("T")


class RedisStore:
    """``serving.state.StateStore``. Lives on one event loop; ``close`` ends its task."""

    def __init__(
        self,
        url: str,
        namespace: str = "default",
        *,
        deadline_s: float = DEADLINE_S,
        probe_s: float = PROBE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=deadline_s,
            socket_connect_timeout=CONNECT_S,
            max_connections=MAX_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._prefix = f"evenflow:{namespace}:"
        self._deadline_s, self._probe_s = deadline_s, probe_s
        self._clock = clock
        self._own = MemoryStore(clock=clock)  # what this process wrote
        self._failed_at: float | None = None
        self._probe: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether the last operation reached Redis."""
        return self._failed_at is None

    async def get(self, key: str) -> Value | None:
        text = await self._try(lambda: self._client.get(self._prefix + key))
        value = _value(text)
        return value if value is not None else await self._own.get(key)

    async def set(self, key: str, value: Value, ttl_s: float) -> None:
        await self._own.set(key, value, ttl_s)
        await self._try(lambda: self._write(key, value, ttl_s))

    async def delete(self, key: str) -> None:
        await self._own.delete(key)
        await self._try(lambda: self._client.delete(self._prefix + key))

    async def scan(self, prefix: str) -> dict[str, Value]:
        found = await self._try(lambda: self._scan(prefix)) or {}
        return {**await self._own.scan(prefix), **found}

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._client.aclose()

    async def _write(self, key: str, value: Value, ttl_s: float) -> None:
        text = json.dumps(value, separators=(",", ":"))
        if len(text) <= MAX_VALUE_BYTES:
            await self._client.set(self._prefix + key, text, px=max(1, round(ttl_s * 1000)))

    async def _scan(self, prefix: str) -> dict[str, Value]:
        pattern = _literally(self._prefix + prefix) + "*"
        keys = [key async for key in self._client.scan_iter(match=pattern, count=SCAN_BATCH)]
        texts = await self._client.mget(keys) if keys else []
        values = {key: _value(text) for key, text in zip(keys, texts, strict=True)}
        own = len(self._prefix)
        return {key[own:]: value for key, value in values.items() if value is not None}

    async def _try(self, operation: Callable[[], Awaitable[T]]) -> T | None:
        """None at once while the breaker is open, and after a failure, which opens it."""
        if self._failed_at is not None:
            return None
        try:
            async with asyncio.timeout(self._deadline_s):
                return await operation()
        except (RedisError, OSError, TimeoutError) as error:
            self._open(error)
            return None

    def _open(self, error: Exception) -> None:
        if self._failed_at is None:
            log.warning("redis is gone, serving from local state: %s", type(error).__name__)
            self._failed_at = self._clock()
            self._probe = asyncio.create_task(self._recover(), name="redis probe")

    async def _recover(self) -> None:
        """Until Redis answers again and has all that this process wrote and that still lives."""
        while True:
            await asyncio.sleep(self._probe_s)
            try:
                async with asyncio.timeout(self._deadline_s):
                    await self._client.ping()
                for key, (ttl_s, value) in self._own.living().items():
                    async with asyncio.timeout(self._deadline_s):
                        await self._write(key, value, ttl_s)
            except (RedisError, OSError, TimeoutError):
                continue
            self._failed_at = None
            log.warning("redis is back")
            return


def _value(text: Any) -> Value | None:
    """Somebody else's nonsense under our key is no value."""
    if not isinstance(text, str):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _literally(text: str) -> str:
    """For a pattern: characters that mean themselves."""
    return "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in text)
