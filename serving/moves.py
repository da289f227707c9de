"""Streams that change their worker while they run: because its role changed, because it is leaving,
or because somebody asked.

It decides who goes where and says so to the workers. It refuses to know how a stream goes on after
its hand-off: ``serving.gateway`` does, with or without pages.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from serving.core.predict import ReplicaView
from serving.core.router import rehome
from serving.errors import BadRequest, NotFound, Unavailable
from serving.pools import DECODE, MIXED, PREFILL, Pools, WorkerView
from workers.core.request import Request

CONFIRM_S = 5.0  # for a worker to confirm its new role


class Stream(Protocol):
    """What is moved: one sequence of a call."""

    request: Request
    at: str  # the worker that it runs on now; "" before it is routed
    target: str  # the worker that it has been told to move to; "" when none
    lost: list[str]


class Moves:
    """``replicas`` are those that take new work; ``running`` are the streams of this gateway."""

    def __init__(
        self,
        pools: Pools,
        replicas: Callable[[], list[ReplicaView]],
        running: Callable[[], Iterable[Stream]],
    ) -> None:
        self._pools, self._replicas, self._running = pools, replicas, running
        self._change = asyncio.Event()
        pools.on_change(self._on_change)

    async def set_role(self, worker: str, role: str) -> None:
        """What the worker prefers to do from now on; a drained one takes requests again. Its
        streams stay, or move when it is to prefill and others decode. NotFound, BadRequest."""
        if role not in (MIXED, PREFILL, DECODE):
            raise BadRequest(f"{role!r} is not one of mixed, prefill, decode", "role")
        self._named(worker)
        self._pools.set_role(worker, role)
        await self._confirmed(worker, lambda view: view.role == role and not view.is_leaving)

    async def drain(self, worker: str) -> None:
        """The worker takes nothing new, and its streams move to others that can take them.
        NotFound."""
        self._named(worker)
        self._pools.drain(worker)
        await self._confirmed(worker, lambda view: view.is_leaving)

    def move(self, stream: Stream, worker: str) -> None:
        """After its next token the stream goes on there. NotFound."""
        self._named(worker)
        self._move(stream, worker)

    def home(self, stream: Stream, avoid: Collection[str]) -> str | None:
        """Where a stream goes that was handed off; None when nobody can take it."""
        target, stream.target = stream.target, ""
        if target not in avoid and self.takes_new(target):
            return target
        return rehome(stream.request.max_tokens_total, self._replicas(), avoid)

    def takes_new(self, worker: str) -> bool:
        return any(v.id == worker and not v.is_leaving for v in self._pools.workers())

    def _on_change(self, worker: str) -> None:
        """A worker has another role, or is leaving: its streams go where they do better."""
        self._change.set()
        view = next((v for v in self._pools.workers() if v.id == worker), None)
        is_leaving = view is None or view.is_leaving
        if view is not None and not is_leaving and view.role != PREFILL:
            return
        for stream in [stream for stream in self._running() if stream.at == worker]:
            homes = [r for r in self._replicas() if is_leaving or r.role != PREFILL]
            home = rehome(stream.request.max_tokens_total, homes, (worker, *stream.lost))
            if home is not None:
                self._move(stream, home)

    def _move(self, stream: Stream, target: str) -> None:
        if stream.at and stream.at != target:
            stream.target = target
            self._pools.hand_off(stream.at, stream.request.id)

    def _named(self, worker: str) -> WorkerView:
        for view in self._pools.workers():
            if view.id == worker:
                return view
        raise NotFound(f"no worker {worker[:128]!r} is attached")

    async def _confirmed(self, worker: str, is_so: Callable[[WorkerView], bool]) -> None:
        try:
            async with asyncio.timeout(CONFIRM_S):
                while not is_so(self._named(worker)):
                    self._change.clear()
                    await self._change.wait()
        except TimeoutError:
            raise Unavailable(f"{worker} did not confirm within {CONFIRM_S:g} s") from None
