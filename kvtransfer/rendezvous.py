"""How the two ranks of a pair find each other, and nothing after that.

A process group exchanges addresses through a store. Here each side has a store of its own, and the
control message ``Open`` carries the entries across: nothing listens, nothing is shared by more than
two, and no host name is looked up (torch's TCPStore asks DNS on every connection, and a lost answer
costs 5 s). There is no group of everybody: a worker that comes or goes concerns its own pairs only.

    receiver: make the group until it waits --Open(entries)--> source: make the group
              ... go on with its entries    <---(entries)----          until it waits, go on
"""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

c10d: Any = torch.distributed  # its stubs lack most of what is used here
Group = Any  # a c10d backend of two ranks: send, recv, abort

SOURCE_RANK, TARGET_RANK = 0, 1
GLOO_PATIENCE = 5  # Gloo waits for a connection this many times longer than it was told
NCCL_MAX_CTAS = 2  # page traffic must leave the device to the model


class _Store(c10d.Store):  # type: ignore[misc]
    """What one rank has said and heard. The process group calls the methods of ``c10d.Store``."""

    def __init__(self, timeout_s: float, entries: Future[dict[str, bytes]]) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._entries = entries
        self._said: dict[str, bytes] = {}
        self._heard: dict[str, bytes] = {}
        self._failure: str | None = None
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._said[key] = bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._find(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until the other side has said all of it. Asking means that this side has said its own."""
        if all(key in self._said for key in keys):
            return
        self.settle()
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._has(keys), self._timeout_s)
            if not self._has(keys):
                raise RuntimeError(self._failure or "the other side of the pair never came")

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return self._has(keys)

    def has_extended_api(self) -> bool:
        return False

    def settle(self) -> None:
        """Once: this side has said all it can."""
        with self._changed:
            if not self._entries.done():
                self._entries.set_result(dict(self._said))

    def hear(self, entries: Mapping[str, bytes]) -> None:
        with self._changed:
            self._heard.update(entries)
            self._changed.notify_all()

    def cancel(self, reason: str) -> None:
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._said or key in self._heard for key in keys)

    def _find(self, key: str) -> bytes:
        with self._changed:
            return self._said[key] if key in self._said else self._heard[key]


class Rendezvous:
    """One rank's half of a meeting. ``run`` blocks, on a thread of the caller's choice.

    Letting go of it, and of the group, closes the connection: there must be no cycle in here.
    """

    def __init__(self, rank: int, host: str, device: torch.device, timeout_s: float) -> None:
        self.entries: Future[dict[str, bytes]] = Future()  # what the other side must hear
        self.group: Future[Group] = Future()
        self.entries.set_running_or_notify_cancel()
        self.group.set_running_or_notify_cancel()
        self._rank = rank
        self._host = host
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._store = _Store(timeout_s, self.entries)

    def run(self) -> None:
        make = _make_nccl if self._device.type == "cuda" else _make_gloo
        try:
            group = make(self._store, self._rank, self._host, self._device, self._timeout)
        except Exception as error:  # whatever it was, the other side waits to be told
            if not self.entries.done():
                self.entries.set_exception(RuntimeError(str(error)))
            self.group.set_exception(RuntimeError(str(error)))
            return
        self._store.settle()
        self.group.set_result(group)

    def hear(self, entries: Mapping[str, bytes]) -> None:
        """What the other side said."""
        self._store.hear(entries)

    def cancel(self, reason: str) -> None:
        """The other side will not come: ``run`` need not wait for it."""
        self._store.cancel(reason)


def _make_gloo(store: Any, rank: int, host: str, device: torch.device, timeout: timedelta) -> Group:
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout / GLOO_PATIENCE
    options._threads = 1
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    return c10d.ProcessGroupGloo(store, rank, 2, options)


def _make_nccl(store: Any, rank: int, host: str, device: torch.device, timeout: timedelta) -> Group:
    # 2: on an error clean up this communicator; the default would end the whole worker.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0  # so that neither set-up nor abort can hang
    options.config.max_ctas = NCCL_MAX_CTAS
    group = c10d.ProcessGroupNCCL(store, rank, 2, options)
    group.eager_connect_single_device(device)
    return group
