"""Every page is in exactly one place."""

import random

import pytest

from tests.stepper import request
from workers.core.pages import PagePool
from workers.core.request import Sequence


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_a_page_is_free_or_held_by_one_sequence(page_size):
    """FAULTS 41: random operations, invariants as we go."""
    rng = random.Random(page_size)
    pool = PagePool(200, page_size)
    live: list[Sequence] = []
    for i in range(100_000):
        if live and rng.random() < 0.45:
            pool.release(live.pop(rng.randrange(len(live))))
        else:
            seq = rng.choice(live) if live and rng.random() < 0.5 else Sequence(request("s", 1))
            want = len(seq.pages) * page_size + rng.randint(1, 3 * page_size)
            if pool.fits(seq, want):
                pool.grow(seq, want)
                if seq not in live:
                    live.append(seq)
        if i % 100 == 0:
            held = [page for seq in live for page in seq.pages]
            assert len(held) == len(set(held)) == 200 - pool.num_free
    for seq in live:
        pool.release(seq)
    assert pool.num_free == 200


def test_a_page_freed_twice_is_noticed():
    """FAULTS 41."""
    pool = PagePool(4, 16)
    seq = Sequence(request("s", 1))
    pool.grow(seq, 20)
    pages = list(seq.pages)
    pool.release(seq)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.take_back(pages)
