"""Where the two ranks of a pair find each other, and nothing after that.

Each receiver hosts one store. Every pair has a key of its own in it, made of both incarnations and
a generation, so that a stale member can never join a newer pair. There is no group of everybody:
a worker that comes or goes concerns its own pairs only.
"""

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

c10d: Any = torch.distributed  # its stubs lack most of what is used here
Group = Any  # a c10d backend of two ranks: send, recv, abort

SOURCE_RANK, TARGET_RANK = 0, 1
NCCL_MAX_CTAS = 2  # page traffic must leave the device to the model


class Rendezvous:
    """One receiver's store: reachable on ``host`` alone, and under ``port``."""

    def __init__(self, host: str, timeout_s: float) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._lock = threading.Lock()
        self._store = c10d.TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def host_pair(self, key: str, device: torch.device, timeout_s: float) -> Group:
        """Wait for the source and return the pair, as its receiving rank."""
        with self._lock:
            store = self._store.clone()
        return _make_group(store, key, TARGET_RANK, self.host, device, timeout_s)

    def forget(self, key: str) -> None:
        """Delete what a pair that is gone left in the store."""
        with self._lock:
            for name in self._store.list_keys():
                if name.startswith(f"{key}/"):
                    self._store.delete_key(name)


def join_pair(
    store_host: str, store_port: int, key: str, host: str, device: torch.device, timeout_s: float
) -> Group:
    """Meet the receiver at its store and return the pair, as its sending rank."""
    store = c10d.TCPStore(
        store_host,
        store_port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return _make_group(store, key, SOURCE_RANK, host, device, timeout_s)


def _make_group(
    store: Any, key: str, rank: int, host: str, device: torch.device, timeout_s: float
) -> Group:
    store.set_timeout(timedelta(seconds=timeout_s))
    scoped = c10d.PrefixStore(key, store)
    make = _make_nccl if device.type == "cuda" else _make_gloo
    return make(scoped, rank, host, device, timedelta(seconds=timeout_s))


def _make_gloo(store: Any, rank: int, host: str, device: torch.device, timeout: timedelta) -> Group:
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
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
