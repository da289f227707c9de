"""What gateways tell each other through the shared state: which worker was sent which prefix.

Every period each writes down what it has sent lately, under ``prefixes:<id>``, and reads what the
others did. A name says nothing about a text to those who lack the deployment's key. Nothing waits
for this, and what is lost is only a prefix computed twice.
"""

import asyncio
from collections import deque
from typing import Protocol

from serving.peers import LEASE_S, PERIOD_S, Peers
from serving.state import StateStore

PREFIX = "prefixes:"
ROUNDS = 5  # that something is told, so that one that is slow to read hears of it


class Knowing(Protocol):
    """``serving.routing.Routing``."""

    def news(self) -> dict[str, list[int]]: ...
    def hear(self, worker: str, names: list[int]) -> None: ...


class PrefixNews:
    """``start`` and ``stop`` on one event loop."""

    def __init__(
        self, store: StateStore, routing: Knowing, peers: Peers, period_s: float = PERIOD_S
    ) -> None:
        self._store, self._routing, self._peers = store, routing, peers
        self._period_s = period_s
        self._told: deque[dict[str, list[int]]] = deque(maxlen=ROUNDS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="prefix news")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def exchange(self) -> None:
        """One round."""
        self._told.append(self._routing.news())
        if self._peers.is_alone:
            return
        held: dict[str, list[int]] = {}
        for news in self._told:
            for worker, names in news.items():
                held.setdefault(worker, []).extend(names)
        own = PREFIX + self._peers.id
        await self._store.set(own, held, LEASE_S)
        for key, others in (await self._store.scan(PREFIX)).items():
            for worker, names in others.items() if key != own else ():
                self._routing.hear(worker, names)

    async def _run(self) -> None:
        while True:
            await self.exchange()
            await asyncio.sleep(self._period_s)
