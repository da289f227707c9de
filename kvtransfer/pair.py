"""Two ranks and the bytes between them: a ProcessGroup whose every wait has a deadline.

A pair that failed once is dead for ever, on both sides: whoever drops it closes the connection,
so that the other side's wait ends as well. It serves one transfer at a time and has no lock.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch import Tensor

from kvtransfer.deadline import Deadline
from kvtransfer.rendezvous import SOURCE_RANK, TARGET_RANK, Group, Rendezvous
from kvtransfer.staging import Piece

POLL_S = 0.0002


class Pair:
    def __init__(self, rendezvous: Rendezvous, device: torch.device, timeout_s: float = 0) -> None:
        """RuntimeError, or TimeoutError, when the two did not meet within ``timeout_s``."""
        self._rendezvous = rendezvous  # the group may ask its store again
        self._group: Group = rendezvous.group.result(timeout_s)
        self._device = device
        self._stream = _new_stream(device) if device.type == "cuda" else None

    def stream(self) -> AbstractContextManager[None]:
        """Copies from and to staging belong in here, off the model's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def follow_model(self) -> None:
        """What is copied next inside ``stream()`` sees what the model has been told to compute."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def send(self, pieces: Iterable[Piece], transfer: int, deadline: Deadline) -> None:
        """Returns when the receiver has taken all of them. Each is drawn while the one before it is
        on its way."""
        work = None
        for piece in pieces:
            if work is not None:
                self._wait(work, deadline)
            with self.stream():
                work = self._group.send([piece.wire], TARGET_RANK, _tag(transfer))
        if work is not None:
            self._wait(work, deadline)

    def receive(
        self, pieces: Sequence[Piece], transfer: int, deadline: Deadline
    ) -> Iterator[Piece]:
        """Each of the pieces, of exactly the sizes that are sent, once it is here; the next one
        arrives meanwhile."""
        work = self._post(pieces[0], transfer)
        for i, piece in enumerate(pieces):
            self._wait(work, deadline)
            if i + 1 < len(pieces):
                work = self._post(pieces[i + 1], transfer)
            yield piece

    def drop(self) -> None:
        if self._device.type == "cuda":
            self._group.abort()
        del self._group, self._rendezvous

    def _post(self, piece: Piece, transfer: int) -> Any:
        with self.stream():
            return self._group.recv([piece.wire], SOURCE_RANK, _tag(transfer))

    def _wait(self, work: Any, deadline: Deadline) -> None:
        if self._stream is None:
            work.wait(timedelta(seconds=deadline.left_s("the next piece")))
            return
        while not work.is_completed():  # on CUDA wait() would only order streams
            deadline.left_s("the next piece")
            time.sleep(POLL_S)
        with self.stream():
            work.wait()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the copies made inside ``stream()``."""
        if self._stream is not None:
            self._stream.synchronize()


def seal(piece: Piece) -> None:
    """Put the pages' checksum behind them."""
    piece.checksum.copy_(torch.frombuffer(bytearray(_digest(piece)), dtype=torch.uint8))


def is_intact(piece: Piece) -> bool:
    """Whether the pages are what was sealed."""
    return bytes(_host_bytes(piece.checksum)) == _digest(piece)


def _digest(piece: Piece) -> bytes:
    return xxhash.xxh3_64_digest(_host_bytes(piece.records))


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _host_bytes(buffer: Tensor) -> Any:
    return buffer.cpu().numpy()


def _tag(transfer: int) -> int:
    return transfer & 0x7FFFFFFF
