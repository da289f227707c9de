"""The road that ``bench.handoff`` measures on is a real one."""

import pytest

from bench.transfer import open_road
from kvtransfer.core.handle import KVLayout

pytestmark = pytest.mark.cluster
LAYOUT = KVLayout("m", num_layers=2, num_kv_heads=2, head_dim=32, page_size=16, dtype="float32")


def test_pages_move_as_often_as_they_are_measured() -> None:
    with open_road(LAYOUT, 20) as road:
        for num_pages in (1, 20):
            cost = road.measure(num_pages, 2)
            assert cost.num_bytes == num_pages * LAYOUT.page_bytes
            assert cost.raw_s > 0 and cost.fetch_s > 0
