"""The address book of this process: which worker can be reached where, by pool.

A module and not an object, because Serve copies the router class that writes to it by value, with
everything it refers to; a module it refers to is imported instead, so all copies meet here.
"""

import threading
from collections.abc import Callable

Addresses = dict[str, str]  # worker id -> "host:port"

_lock = threading.Lock()
_pools: dict[str, Addresses] = {}
_listeners: list[Callable[[Addresses], None]] = []


def listen(listener: Callable[[Addresses], None]) -> None:
    """``listener`` gets everybody's address now and after each change, on any thread."""
    with _lock:
        _listeners.append(listener)
        listener(_everybody())


def replace(pool: str, addresses: Addresses) -> None:
    """These are the pool's workers now."""
    with _lock:
        if _pools.get(pool) == addresses:
            return
        _pools[pool] = addresses
        for listener in _listeners:
            listener(_everybody())


def _everybody() -> Addresses:
    return {worker: address for pool in _pools.values() for worker, address in pool.items()}
