"""Two ranks and the bytes between them: a ProcessGroup whose every wait has a deadline.

A pair that failed once is dead for ever, on both sides: whoever drops it closes the connection,
so that the other side's wait ends as well. It serves one transfer at a time and has no lock.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch import Tensor

from kvtransfer.deadline import Deadline
from kvtransfer.rendezvous import SOURCE_RANK, TARGET_RANK, Group, Rendezvous

PIECE_BYTES = 8 << 20  # a deadline takes effect between two pieces
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

    def send(self, buffer: Tensor, transfer: int, deadline: Deadline) -> None:
        """Returns when the receiver has taken all of it."""
        for piece in torch.split(buffer, PIECE_BYTES):
            with self.stream():
                work = self._group.send([piece], TARGET_RANK, _tag(transfer))
            self._wait(work, deadline)

    def receive(self, buffer: Tensor, transfer: int, deadline: Deadline) -> int:
        """Fill ``buffer``, of exactly the size that is sent; returns the checksum of the bytes."""
        digest = xxhash.xxh3_64()
        pieces = torch.split(buffer, PIECE_BYTES)
        work = self._post(pieces[0], transfer)
        for i, piece in enumerate(pieces):
            self._wait(work, deadline)
            if i + 1 < len(pieces):
                work = self._post(pieces[i + 1], transfer)  # arrives while this one is hashed
            digest.update(_host_bytes(piece))
        return digest.intdigest()

    def drop(self) -> None:
        if self._device.type == "cuda":
            self._group.abort()
        del self._group, self._rendezvous

    def _post(self, piece: Tensor, transfer: int) -> Any:
        with self.stream():
            return self._group.recv([piece], SOURCE_RANK, _tag(transfer))

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


def checksum(buffer: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(_host_bytes(buffer))


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _host_bytes(buffer: Tensor) -> Any:
    return buffer.cpu().numpy()


def _tag(transfer: int) -> int:
    return transfer & 0x7FFFFFFF
