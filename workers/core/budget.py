"""Clock 1: how much prompt may ride in a step, and whose prompt goes first.

The budget is time. A step may last as long as the tightest gap that was promised to a running
decode, and never so long that a newcomer waits noticeably for the next one; what the decodes leave
of it goes to prompts. It knows the latency model and promises, and no pages, queues or clocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from workers.core.latency import KNEE, LatencyModel
from workers.core.plan import BatchShape

CEILING_S = 0.16  # of a step with prompts: half of what a short prompt waits for its first token
DELIVERY_S = 0.002  # of a promised gap is left to whoever carries the token to the reader
FLOOR_TOKENS = 8  # of prompts in every step, whatever was promised: nobody starves
LOST_SHARE = 0.5  # of decode time goes to prompts once decodes alone break the promise
MIN_RATE = 0.05
PATIENCE = 3.0  # a prompt too long for its SLO is due after so many times its own work


@dataclass(slots=True)
class Room:
    """What one step still has for prompts."""

    model: LatencyModel
    shape: BatchShape  # of the step so far
    promised_s: float  # the model's confident prediction stays below
    ceiling_s: float  # its plain prediction stays below
    floor_tokens: int = FLOOR_TOKENS
    prompt_rate: float = 1.0  # part of the step that prompts are given

    def longest(self, start: int, most: int) -> int:
        """How many of a prompt's next ``most`` tokens fit, the first being number ``start``."""
        if self._fits(start, most):
            return most
        low, high = 0, most  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(start, middle):
                low = middle
            else:
                high = middle
        if not self.shape.prefill_tokens:
            return max(low, min(most, self.floor_tokens))
        return low if low >= KNEE else 0  # crumbs are not worth another sequence in the step

    def take(self, start: int, length: int) -> None:
        self.shape = self._with(start, length)

    def _fits(self, start: int, length: int) -> bool:
        shape = self._with(start, length)
        expected = self.model.step_s(shape)
        return expected <= self.ceiling_s and expected * self.model.margin(True) <= self.promised_s

    def _with(self, start: int, length: int) -> BatchShape:
        return BatchShape(
            self.shape.prefill_tokens + length,
            self.shape.prefill_context + length * (start + length),
            self.shape.decode_seqs,
            self.shape.decode_context,
        )


class Bounds(NamedTuple):
    """How long a step with prompts and decodes may last."""

    promised_s: float  # by the confident prediction; infinite when decodes alone break it
    ceiling_s: float  # by the plain one
    most_s: float  # by the plain one, when both are kept


def bounds_of(alone_s: float, itl_s: float, margin: float) -> Bounds:
    """For decodes that take ``alone_s`` by themselves, the tightest of them promised gaps of
    ``itl_s``; ``margin`` makes a plain prediction a confident one."""
    if alone_s > itl_s:  # lost with or without prompts
        ceiling = alone_s * (1 + LOST_SHARE)
        return Bounds(inf, ceiling, ceiling)
    promised, ceiling = itl_s - DELIVERY_S, max(CEILING_S, alone_s)
    return Bounds(promised, ceiling, min(ceiling, promised / margin))


def room_for(model: LatencyModel, decodes: BatchShape, itl_s: float) -> Room:
    """For a step with these decodes, of which the tightest was promised gaps of ``itl_s``
    (infinite when there is none)."""
    if not decodes.decode_seqs:
        return Room(model, decodes, inf, CEILING_S)
    alone = model.step_s(decodes)
    bounds = bounds_of(alone, itl_s, model.margin(True))
    rate = max(MIN_RATE, 1.0 - alone / bounds.most_s)
    return Room(model, decodes, bounds.promised_s, bounds.ceiling_s, prompt_rate=rate)


@dataclass(frozen=True, slots=True)
class Due:
    """One prompt, as the order sees it."""

    priority: int
    deadline: float
    left_s: float  # predicted work


Urgency = Callable[[Due], tuple[float, ...]]


def deadline(arrived_at: float, ttft_s: float, work_s: float) -> float:
    """When a prompt's first token is due. One whose work alone exceeds its SLO is given a date
    that can be kept, so that it neither pushes everybody aside nor is given up. The date never
    moves: who waits grows urgent by itself."""
    return arrived_at + max(ttft_s, PATIENCE * work_s)


def shortest_first(due: Due) -> tuple[float, ...]:
    return due.priority, due.left_s, due.deadline


def earliest_first(due: Due) -> tuple[float, ...]:
    return due.priority, due.deadline, due.left_s


def urgency(prompts: Sequence[Due], now: float, rate: float) -> Urgency:
    """What to sort these prompts by: the shortest goes first as long as everybody still makes the
    date, otherwise who is due first. ``rate`` is the part of the time that prompts are given."""
    end = now
    for prompt in sorted(prompts, key=shortest_first):
        end += prompt.left_s / rate
        if end > prompt.deadline:
            return earliest_first
    return shortest_first
