"""A source of pages that misbehaves on purpose, at given rates and from a seed.

Off unless the configuration asks for it: for tests and ``bench.faults`` only. What the receiver
sees is what a broken network or a broken source would show it.
"""

import contextlib
import random
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from kvtransfer.control import NoPair
from kvtransfer.deadline import Deadline
from kvtransfer.pair import Pair
from kvtransfer.source import PageSource
from kvtransfer.staging import Piece
from kvtransfer.transport import TransferError
from protos import evenflow_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PageFaults:
    """The part of transfers that suffers each fault."""

    drop: float = 0.0  # announced, and never sent
    delay: float = 0.0  # sent up to ``delay_s`` later
    truncate: float = 0.0  # only the first half is sent
    flip: float = 0.0  # one bit of the bytes
    duplicate: float = 0.0  # the same control message twice
    reorder: float = 0.0  # a release that arrives after the next one
    delay_s: float = 2.0
    seed: int = 0


def read_faults(kind: type[T], text: str) -> T:
    """``"drop=0.05 seed=3"`` as a dataclass of numbers. ValueError names what is wrong."""
    known = {f.name: f.type for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
        values[name] = int(value) if known[name] is int else float(value)
    return kind(**values)


class FaultySource(PageSource):
    """Draws its faults from one generator, in the order of events."""

    def __init__(self, *args: Any, faults: PageFaults, **options: Any) -> None:
        super().__init__(*args, **options)
        self._faults = faults
        self._rng = random.Random(faults.seed)
        self._held_back: tuple[str, str] | None = None
        self.num_faults = 0

    def send(self, request: pb.SendRequest) -> "Future[pb.SendResponse]":
        answer = super().send(request)
        if self._strikes(self._faults.duplicate):
            with contextlib.suppress(NoPair):  # as it should be: the number is over
                super().send(request)
        return answer

    def release(self, request_id: str, incarnation: str) -> None:
        late, self._held_back = self._held_back, None
        if late is None and self._strikes(self._faults.reorder):
            self._held_back = (request_id, incarnation)
            return
        super().release(request_id, incarnation)
        if late is not None:
            super().release(*late)
        if self._strikes(self._faults.duplicate):
            super().release(request_id, incarnation)

    def _send(self, pair: Pair, pieces: Iterable[Piece], transfer: int, deadline: Deadline) -> None:
        if self._strikes(self._faults.flip):
            pieces = self._flipped(list(pieces))
        if self._strikes(self._faults.delay):
            time.sleep(self._rng.random() * self._faults.delay_s)
        if self._strikes(self._faults.drop):
            time.sleep(max(0.0, deadline.at - time.monotonic()))
            raise TransferError("dropped on purpose")
        if self._strikes(self._faults.truncate):
            pieces = _first_half(list(pieces))
        pair.send(pieces, transfer, deadline)

    def _flipped(self, pieces: list[Piece]) -> list[Piece]:
        wire = self._rng.choice(pieces).wire
        wire[self._rng.randrange(wire.numel())] ^= 1 << self._rng.randrange(8)
        return pieces

    def _strikes(self, rate: float) -> bool:
        strikes = rate > 0 and self._rng.random() < rate
        self.num_faults += strikes
        return strikes


def _first_half(pieces: list[Piece]) -> list[Piece]:
    if len(pieces) > 1:
        return pieces[: len(pieces) // 2]
    wire = pieces[0].wire
    return [replace(pieces[0], wire=wire[: wire.numel() // 2])]
