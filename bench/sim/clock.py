"""Virtual time: what happens next, and when. It never sleeps and knows no wall clock."""

import gc
import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Clock:
    """Runs actions in the order of their times; those of one time in the order they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._is_stopped = False
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Call ``action(*args)`` at ``when``, which is not in the past."""
        heapq.heappush(self._events, (when, next(self._order), action, args))

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, action, *args)

    def stop(self) -> None:
        """What has not happened yet does not."""
        self._is_stopped = True

    def run(self) -> None:
        """Until nothing is left to happen."""
        was_collecting = gc.isenabled()
        gc.disable()  # nothing here dies in a cycle, and looking for some costs a tenth
        try:
            self._run()
        finally:
            if was_collecting:
                gc.enable()

    def _run(self) -> None:
        events, pop = self._events, heapq.heappop
        while events and not self._is_stopped:
            self.now, _, action, args = pop(events)
            self.num_events += 1
            action(*args)
