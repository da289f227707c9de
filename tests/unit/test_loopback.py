"""The loopback keeps every promise of Transport, and breaks on demand."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.leases import Leases
from kvtransfer.loopback import LoopbackNetwork, LoopbackTransport
from kvtransfer.transport import TransferError

LAYOUT = KVLayout("m", num_layers=2, num_kv_heads=3, head_dim=4, page_size=8, dtype="float32")


class Worker:
    def __init__(
        self, network: LoopbackNetwork, name: str, layout: KVLayout = LAYOUT, incarnation: str = "1"
    ) -> None:
        self.name, self.layout, self.incarnation = name, layout, incarnation
        self.pool = torch.zeros(16, 2, 3, 2, 8, 4)
        self.leases = Leases(lease_s=10)
        self.transport = LoopbackTransport(
            network, name, self.pool, layout, incarnation, self.leases
        )

    def lease(self, request_id: str, pages: list[int]) -> KVHandle:
        self.leases.grant(request_id, pages, num_tokens=8 * len(pages))
        return KVHandle(
            request_id, self.name, self.incarnation, 8 * len(pages), len(pages), self.layout
        )


@pytest.fixture
def network() -> LoopbackNetwork:
    return LoopbackNetwork()


def test_pages_arrive_in_order_and_the_source_lets_go(network: LoopbackNetwork) -> None:
    source, target = Worker(network, "a"), Worker(network, "b")
    source.pool.normal_()
    handle = source.lease("r", [5, 2, 9])
    assert target.transport.renew(handle)
    target.transport.fetch(handle, [0, 15, 3], timeout_s=1)
    assert torch.equal(target.pool[[0, 15, 3]], source.pool[[5, 2, 9]])
    assert target.pool[[1, 2, 4]].abs().sum() == 0
    assert sorted(source.leases.take_free()) == [2, 5, 9] and source.leases.held() == {}
    target.transport.release(handle)


BREAK: dict[str, Callable[[Worker, KVHandle], KVHandle]] = {
    "nobody": lambda source, handle: replace(handle, source="c"),
    "restarted": lambda source, handle: replace(handle, incarnation="2"),
    "no lease": lambda source, handle: replace(handle, request_id="x"),
    "2 pages on offer": lambda source, handle: replace(handle, num_pages=2),
}


@pytest.mark.parametrize("reason", BREAK)
def test_a_failed_fetch_says_why_and_changes_nothing(network: LoopbackNetwork, reason: str) -> None:
    source, target = Worker(network, "a"), Worker(network, "b")
    source.pool.normal_()
    handle = source.lease("r", [1])
    with pytest.raises(TransferError, match=reason):
        target.transport.fetch(BREAK[reason](source, handle), [1], timeout_s=1)
    assert target.pool.abs().sum() == 0 and source.leases.held() == {"r": 1}
    target.transport.fetch(handle, [1], timeout_s=1)


def test_layouts_that_differ_are_refused_by_the_field(network: LoopbackNetwork) -> None:
    """FAULTS 63: the reason names the field."""
    source = Worker(network, "a")
    target = Worker(network, "b", replace(LAYOUT, page_size=32))
    with pytest.raises(TransferError, match="page_size: 32 here, 8 there"):
        target.transport.fetch(source.lease("r", [1]), [1], timeout_s=1)
    assert source.leases.held() == {"r": 1}


def test_release_is_idempotent_and_never_raises(network: LoopbackNetwork) -> None:
    source, target = Worker(network, "a"), Worker(network, "b")
    handle = source.lease("r", [4])
    for _ in range(3):
        target.transport.release(handle)
    assert source.leases.take_free() == [4]
    source.transport.close()
    target.transport.release(handle)
    assert not target.transport.renew(handle)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_fault_leaves_the_lease_and_nothing_pinned(network: LoopbackNetwork, moment: str) -> None:
    source, target = Worker(network, "a"), Worker(network, "b")
    handle = source.lease("r", [4, 7])

    def fault(when: str, _: KVHandle) -> None:
        if when == moment:
            raise TransferError("pulled the cable")

    target.transport.fault = fault
    with pytest.raises(TransferError, match="cable"):
        target.transport.fetch(handle, [1, 2], timeout_s=1)
    assert source.leases.held() == {"r": 2}
    source.leases.release("r")
    assert sorted(source.leases.take_free()) == [4, 7], "nothing is pinned"


def test_a_slow_copy_times_out(network: LoopbackNetwork) -> None:
    source, target = Worker(network, "a"), Worker(network, "b")
    target.transport.fault = lambda when, handle: time.sleep(0.02)
    with pytest.raises(TransferError, match="timed out"):
        target.transport.fetch(source.lease("r", [1]), [1], timeout_s=0.01)


def test_a_restarted_worker_does_not_answer_for_its_predecessor(network: LoopbackNetwork) -> None:
    old, target = Worker(network, "a"), Worker(network, "b")
    handle = old.lease("r", [1])
    new = Worker(network, "a", incarnation="2")
    old.transport.close()
    with pytest.raises(TransferError, match="restarted"):
        target.transport.fetch(handle, [1], timeout_s=1)
    target.transport.fetch(new.lease("r", [1]), [1], timeout_s=1)


def test_closing_fails_what_is_pending(network: LoopbackNetwork) -> None:
    source, target = Worker(network, "a"), Worker(network, "b")
    target.transport.fault = lambda when, handle: target.transport.close()
    with pytest.raises(TransferError, match="closed"):
        target.transport.fetch(source.lease("r", [1]), [1], timeout_s=1)


def test_pools_may_be_inference_tensors(network: LoopbackNetwork) -> None:
    source, target = Worker(network, "a"), Worker(network, "b")
    with torch.inference_mode():
        pool = torch.zeros_like(target.pool)
    target.transport = LoopbackTransport(network, "b", pool, LAYOUT, "1", target.leases)
    source.pool.normal_()
    target.transport.fetch(source.lease("r", [1]), [2], timeout_s=1)
    assert torch.equal(pool[2], source.pool[1])
