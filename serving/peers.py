"""The other gateways of a deployment, as far as the shared state tells: who is there, and how busy.

Each gateway holds a lease under ``gateway:<id>`` and renews it; one that dies is forgotten when its
lease ends. Nothing waits for this: it is news, a few seconds old. The one that has been there
longest leads: what is to be done once, for all of them, it does.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from serving.state import StateStore

PERIOD_S = 2.0
LEASE_S = 10.0  # five tries to renew it
PREFIX = "gateway:"

Facts = Mapping[str, Any]


class Peers:
    """``start`` and ``stop`` on one event loop; ``facts`` says what the others shall know."""

    def __init__(
        self, store: StateStore, facts: Callable[[], Facts], period_s: float = PERIOD_S
    ) -> None:
        self._store, self._facts, self._period_s = store, facts, period_s
        self.id = secrets.token_hex(6)
        self._since = round(time.time(), 3)
        self._known: dict[str, Facts] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, **addresses: Any) -> None:
        """``addresses``: how this gateway is reached."""
        self._task = asyncio.create_task(self._run(addresses), name="gateway lease")

    async def stop(self) -> None:
        """The lease ends at once."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._store.delete(PREFIX + self.id)

    def all(self) -> list[dict[str, Any]]:
        """Every gateway with a lease when this one last looked, itself included."""
        return [{"id": name, **facts} for name, facts in sorted(self._known.items())]

    @property
    def leads(self) -> bool:
        """Of those with a lease when it last looked, this one is the eldest. So is one that has not
        looked yet, or is alone."""
        everyone = [(facts.get("since", 0.0), name) for name, facts in self._known.items()]
        return min(everyone, default=(self._since, self.id)) >= (self._since, self.id)

    @property
    def is_alone(self) -> bool:
        return len(self._known) < 2

    async def look(self, addresses: Facts | None = None) -> None:
        """Renew the lease, and see who else has one."""
        facts = {"since": self._since, **(addresses or {}), **self._facts()}
        await self._store.set(PREFIX + self.id, facts, LEASE_S)
        found = await self._store.scan(PREFIX)
        self._known = {key.removeprefix(PREFIX): facts for key, facts in found.items()}

    async def _run(self, addresses: Facts) -> None:
        while True:
            await self.look(addresses)
            await asyncio.sleep(self._period_s)
