"""Memory that pages pass through between a pool and the wire, kept for the next transfer.

Fresh memory costs about as much as the copy into it. Two spares per side are kept, whatever the
number of pairs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SPARES = 2
CHECKSUM_BYTES = 8  # xxh3-64 of a piece's pages; it keeps the next ones aligned as well
PIECE_BYTES = 8 << 20  # of pages; with small ones the ends wait for each other too often


class Memory:
    """One transfer's bytes. Grows to the largest transfer it has seen."""

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def first(self, num_bytes: int) -> Tensor:
        if self._bytes.numel() < num_bytes:
            device = self._bytes.device
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._bytes[:num_bytes]


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages [first, stop) of a transfer, one message. A deadline takes effect between two."""

    first: int
    stop: int
    wire: Tensor  # uint8: all that is sent
    records: Tensor  # of it the pages
    checksum: Tensor  # and what follows them


def cut(memory: Memory, num_pages: int, page_bytes: int) -> list[Piece]:
    """A transfer's memory in pieces of whole pages, the same at both ends."""
    step = max(1, PIECE_BYTES // page_bytes)
    num_pieces = -(-num_pages // step)
    buffer = memory.first(num_pages * page_bytes + num_pieces * CHECKSUM_BYTES)
    pieces, start = [], 0
    for first in range(0, num_pages, step):
        stop = min(first + step, num_pages)
        tail = start + (stop - first) * page_bytes
        end = tail + CHECKSUM_BYTES
        pieces.append(Piece(first, stop, buffer[start:end], buffer[start:tail], buffer[tail:end]))
        start = end
    return pieces


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spares: list[Memory] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self) -> Iterator[Memory]:
        """Memory for one transfer; that of a failed one is never lent again."""
        with self._lock:
            memory = self._spares.pop() if self._spares else Memory(self._device)
        yield memory
        with self._lock:
            if len(self._spares) < MAX_SPARES:
                self._spares.append(memory)
