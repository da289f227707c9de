"""Unequal tensor-parallel sizes: each head arrives once, from a rank that has it."""

from collections import Counter
from itertools import product

import pytest

from kvtransfer.core.reshard import HeadRange, heads_of, plan

SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize(("source_size", "target_size"), list(product(SIZES, SIZES)))
@pytest.mark.parametrize("num_kv_heads", SIZES)
def test_every_target_gets_its_heads_once_from_a_rank_that_has_them(
    source_size: int, target_size: int, num_kv_heads: int
) -> None:
    ranges = plan(source_size, target_size, num_kv_heads)
    for target in range(target_size):
        heads = [h for r in ranges if r.target == target for h in range(r.start, r.stop)]
        assert heads == list(heads_of(target, target_size, num_kv_heads))
    for r in ranges:
        held = heads_of(r.source, source_size, num_kv_heads)
        assert held.start <= r.start < r.stop <= held.stop
    pairs = Counter((r.source, r.target) for r in ranges)
    assert max(pairs.values()) == 1, "one message per pair of ranks"


@pytest.mark.parametrize(("source_size", "target_size"), list(product(SIZES, SIZES)))
def test_a_pool_resharded_and_back_is_the_same(source_size: int, target_size: int) -> None:
    pools = [list(heads_of(rank, source_size, 8)) for rank in range(source_size)]

    def move(pools: list[list[int]], to: int) -> list[list[int]]:
        moved: list[list[int]] = [[] for _ in range(to)]
        for r in plan(len(pools), to, 8):
            first = heads_of(r.source, len(pools), 8).start
            moved[r.target] += pools[r.source][r.start - first : r.stop - first]
        return moved

    assert move(move(pools, target_size), source_size) == pools


def test_copies_of_a_head_share_the_work() -> None:
    senders = Counter(r.source for r in plan(8, 8, 2))
    assert senders == Counter(range(8))
    assert plan(1, 1, 4) == [HeadRange(0, 0, 0, 4)]


def test_heads_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_kv_heads=3 cannot be split over tp_size=2"):
        plan(2, 1, 3)
    with pytest.raises(ValueError, match="rank=4"):
        heads_of(4, 4, 8)
