"""Memory that pages pass through between a pool and the wire, kept for the next transfer.

Fresh memory costs about as much as the copy into it. Two spares per side are kept, whatever the
number of pairs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MAX_SPARES = 2


class Memory:
    """One transfer's bytes. Grows to the largest transfer it has seen."""

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def first(self, num_bytes: int) -> Tensor:
        if self._bytes.numel() < num_bytes:
            device = self._bytes.device
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._bytes[:num_bytes]


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
