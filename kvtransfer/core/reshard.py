"""Which KV heads go from which rank to which, between workers of unequal tensor-parallel sizes.

A worker of ``tp_size`` ranks splits the heads evenly, in order. With more ranks than heads each
head lies on several ranks in a row: any of them can send it, and receivers take turns.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads [start, stop) of the model, from one rank's pool to another's."""

    source: int
    target: int
    start: int
    stop: int


def heads_of(rank: int, tp_size: int, num_kv_heads: int) -> range:
    """The model's heads that a rank holds. ValueError when they cannot be split evenly."""
    if not 0 <= rank < tp_size:
        raise ValueError(f"{rank=} is not within {tp_size=}")
    if num_kv_heads % tp_size == 0:
        share = num_kv_heads // tp_size
        return range(rank * share, (rank + 1) * share)
    if tp_size % num_kv_heads == 0:
        head = rank * num_kv_heads // tp_size
        return range(head, head + 1)
    raise ValueError(f"{num_kv_heads=} cannot be split over {tp_size=}")


def plan(source_size: int, target_size: int, num_kv_heads: int) -> list[HeadRange]:
    """Every target rank gets each of its heads exactly once, in ranges as long as possible."""
    heads_of(0, source_size, num_kv_heads)  # refused when it cannot be
    ranges: list[HeadRange] = []
    for target in range(target_size):
        for head in heads_of(target, target_size, num_kv_heads):
            source = _holder(head, target, source_size, num_kv_heads)
            last = ranges[-1] if ranges else None
            if last and (last.source, last.target, last.stop) == (source, target, head):
                ranges[-1] = HeadRange(source, target, last.start, head + 1)
            else:
                ranges.append(HeadRange(source, target, head, head + 1))
    return ranges


def _holder(head: int, target: int, source_size: int, num_kv_heads: int) -> int:
    """The rank that sends ``head``; of several, receivers take turns."""
    if source_size <= num_kv_heads:
        return head * source_size // num_kv_heads
    copies = source_size // num_kv_heads
    return head * copies + target % copies
