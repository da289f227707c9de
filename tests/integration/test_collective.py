"""Pages between two processes over Gloo: they arrive intact, or an error arrives in time."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.source import PageSource
from kvtransfer.transport import TransferError
from tests.page_worker import (
    Counting,
    FlippedBit,
    Forgetful,
    KilledHalfWay,
    PageWorker,
    RemoteWorker,
    Slow,
    SlowToLoad,
    StoppedHalfWay,
)

pytestmark = pytest.mark.cluster

SMALL = KVLayout("m", num_layers=3, num_kv_heads=2, head_dim=16, page_size=16, dtype="float32")
HALF = replace(SMALL, dtype="bfloat16")
BIG = replace(SMALL, num_layers=30, num_kv_heads=8, head_dim=64)  # 1.9 MB a page
NUM_PAGES = 40


@pytest.fixture(scope="module")
def remote() -> Iterator[RemoteWorker]:
    worker = RemoteWorker(SMALL, NUM_PAGES, "remote-1")
    worker.call("fill", 1)
    yield worker
    worker.stop()


@pytest.fixture
def start() -> Iterator[Callable[..., RemoteWorker]]:
    workers: list[RemoteWorker] = []

    def start(layout: KVLayout, incarnation: str, *args: object) -> RemoteWorker:
        workers.append(RemoteWorker(layout, NUM_PAGES, incarnation, *args))
        workers[-1].call("fill", 1)
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


@pytest.fixture
def open_local() -> Iterator[Callable[..., PageWorker]]:
    workers: list[PageWorker] = []

    def open_local(
        layout: KVLayout, source: type[PageSource] = PageSource, **kw: int
    ) -> PageWorker:
        name = f"local-{random.getrandbits(32):x}"
        workers.append(PageWorker(layout, NUM_PAGES, name, source, **kw))
        return workers[-1]

    yield open_local
    for worker in workers:
        worker.close()


def eventually(check: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


@pytest.mark.parametrize("layout", [SMALL, HALF], ids=lambda layout: layout.dtype)
def test_pages_arrive_intact_and_the_source_lets_go(
    start: Callable[..., RemoteWorker], open_local: Callable[..., PageWorker], layout: KVLayout
) -> None:
    remote, local = start(layout, "remote-a"), open_local(layout)
    rng = random.Random(7)
    for i in range(20):
        theirs = rng.sample(range(NUM_PAGES), rng.randint(1, NUM_PAGES))
        ours = rng.sample(range(NUM_PAGES), len(theirs))
        others = sorted(set(range(NUM_PAGES)) - set(ours))
        untouched = local.read(others)
        handle = remote.call("lease", f"r{i}", theirs)
        local.fetch(handle, ours)
        assert local.read(ours) == remote.call("read", theirs)
        assert local.read(others) == untouched
        eventually(lambda: remote.call("held") == {})


def test_layouts_that_differ_are_refused_by_the_field(
    remote: RemoteWorker, open_local: Callable[..., PageWorker]
) -> None:
    """FAULTS 63: the reason names the field, whether the handle tells or only the source knows."""
    local = open_local(replace(SMALL, page_size=32))
    handle = remote.call("lease", "r", [1])
    with pytest.raises(TransferError, match="page_size: 32 here, 16 there"):
        local.fetch(handle, [1])
    with pytest.raises(TransferError, match="page_size: 16 here, 32 there"):
        local.fetch(replace(handle, layout=local.layout), [1])
    assert remote.call("held") == {"r": 1}
    local.transport.release(handle)


def test_without_a_lease_nothing_moves_and_the_pair_stays(
    remote: RemoteWorker, open_local: Callable[..., PageWorker]
) -> None:
    local = open_local(SMALL)
    local.fetch(remote.call("lease", "a", [1]), [1])
    pair = next(iter(local.transport._pairs.values())).pair
    handle = remote.call("lease", "b", [2])
    local.transport.release(handle)
    with pytest.raises(TransferError, match="no lease for b"):
        local.fetch(handle, [2])
    local.fetch(remote.call("lease", "c", [3]), [3])
    assert local.read([3]) == remote.call("read", [3])
    assert next(iter(local.transport._pairs.values())).pair is pair


def test_release_is_idempotent_and_renew_knows_what_is_left(
    remote: RemoteWorker, open_local: Callable[..., PageWorker]
) -> None:
    local = open_local(SMALL)
    handle = remote.call("lease", "r", [4, 5])
    assert local.transport.renew(handle)
    assert not local.transport.renew(replace(handle, incarnation="before"))
    local.transport.release(replace(handle, incarnation="before"))
    assert remote.call("held") == {"r": 2}
    for _ in range(3):
        local.transport.release(handle)
    assert remote.call("held") == {} and not local.transport.renew(handle)


def test_nobody_there_is_told_at_once(open_local: Callable[..., PageWorker]) -> None:
    local, other = open_local(SMALL), open_local(SMALL)
    handle = other.lease("r", [1])
    began = time.monotonic()
    gone = replace(handle, source="127.0.0.1:1")
    with pytest.raises(TransferError):
        local.fetch(gone, [1])
    local.transport.release(gone)
    assert not local.transport.renew(gone)
    with pytest.raises(TransferError, match="restarted"):
        local.fetch(replace(handle, incarnation="before"), [1])
    assert time.monotonic() - began < 3
    local.fetch(handle, [1])


def test_more_pages_than_leased_end_the_fetch_and_not_the_process(
    open_local: Callable[..., PageWorker],
) -> None:
    """Gloo ends a process whose buffer is smaller than what is sent."""
    local, other = open_local(SMALL), open_local(SMALL)
    handle = other.lease("r", [1, 2, 3])
    with pytest.raises(TransferError, match="3 pages come, 2 expected"):
        local.fetch(replace(handle, num_pages=2), [1, 2])
    with pytest.raises(TransferError, match="3 pages on offer"):
        local.fetch(handle, [1, 2])
    local.fetch(handle, [1, 2, 3])


def test_both_directions_at_once(
    remote: RemoteWorker, open_local: Callable[..., PageWorker]
) -> None:
    local = open_local(SMALL)
    local.fill(2)
    there, here = list(range(0, 10)), list(range(10, 20))
    handles = [remote.call("lease", f"in{i}", [i]) for i in range(10)]
    results = [remote.soon("fetch", local.lease(f"o{i}", [10 + i]), [30 + i]) for i in range(10)]
    threads = [
        threading.Thread(target=local.fetch, args=(handle, [i])) for i, handle in enumerate(handles)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for result in results:
        result.result(10)
    assert local.read(there) == remote.call("read", there)
    assert local.read(here) == remote.call("read", list(range(30, 40)))


def test_a_flipped_bit_never_reaches_the_pool(open_local: Callable[..., PageWorker]) -> None:
    local, source = open_local(SMALL), open_local(SMALL, FlippedBit)
    source.fill(3)
    with pytest.raises(TransferError, match="checksum"):
        local.fetch(source.lease("r", [1, 2, 3]), [1, 2, 3])
    assert not any(local.read(range(NUM_PAGES))) and source.held() == {"r": 3}


def test_a_source_killed_half_way_is_noticed_at_once_and_replaced(
    start: Callable[..., RemoteWorker], open_local: Callable[..., PageWorker]
) -> None:
    """FAULTS 75: SIGKILL."""
    local, source, spare = open_local(BIG), start(BIG, "a", KilledHalfWay), start(BIG, "b")
    local.fetch(spare.call("lease", "warm", [0]), [0])
    handle = source.call("lease", "r", list(range(20)))
    began = time.monotonic()
    with pytest.raises(TransferError):
        local.fetch(handle, list(range(20)), timeout_s=20)
    assert time.monotonic() - began < 5
    source.process.join(5)
    assert source.process.exitcode == -signal.SIGKILL
    for page in range(1, 20):
        right = spare.call("read", [page])
        assert local.read([page]) in (right, bytes(BIG.page_bytes)), "whole, or untouched"
    assert not any(local.read([19]))
    new = start(BIG, "a2")
    for worker in (spare, new):
        local.fetch(worker.call("lease", "r", list(range(20))), list(range(20)))
        assert local.read(range(20)) == worker.call("read", list(range(20)))


def test_a_frozen_source_costs_the_timeout_and_may_come_back(
    start: Callable[..., RemoteWorker], open_local: Callable[..., PageWorker]
) -> None:
    """FAULTS 75: SIGSTOP, half-way and before anything."""
    local, source = open_local(BIG), start(BIG, "a", StoppedHalfWay)
    pages = list(range(20))
    handle = source.call("lease", "r", pages)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(TransferError):
            local.fetch(handle, pages, timeout_s=1.5)
        assert 1.4 < time.monotonic() - began < 4
    arrived = local.read(pages)
    assert not any(local.read([pages[-1]]))
    pid = source.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.2)
    assert local.read(pages) == arrived, "late pieces are not written"
    local.fetch(handle, pages)
    assert local.read(pages) == source.call("read", pages)


def test_a_slow_source_times_out_and_the_next_generation_works(
    open_local: Callable[..., PageWorker],
) -> None:
    local, source = open_local(SMALL), open_local(SMALL, Slow)
    source.fill(4)
    handle = source.lease("r", [1, 2])
    began = time.monotonic()
    with pytest.raises(TransferError):
        local.fetch(handle, [1, 2], timeout_s=0.2)
    assert time.monotonic() - began < 0.8
    assert not any(local.read([1, 2]))
    local.fetch(handle, [1, 2])
    assert local.read([1, 2]) == source.read([1, 2])
    eventually(lambda: source.held() == {})


def test_a_transfer_that_got_lost_holds_up_no_other(
    open_local: Callable[..., PageWorker],
) -> None:
    """FAULTS 61, 75: others go round it, and it ends by its own deadline."""
    local, source = open_local(SMALL), open_local(SMALL, Forgetful)
    source.fill(4)
    lost, others = source.lease("lost", [1, 2]), [source.lease(f"r{i}", [3 + i]) for i in range(6)]
    ended: list[str] = []

    def wait_for_lost() -> None:
        with pytest.raises(TransferError):
            local.fetch(lost, [1, 2], timeout_s=8.0)
        ended.append("lost")

    thread = threading.Thread(target=wait_for_lost)
    thread.start()
    eventually(lambda: source.endpoint.has_forgotten)  # type: ignore[attr-defined]
    for i, handle in enumerate(others):
        local.fetch(handle, [10 + i], timeout_s=7.0)
        ended.append(handle.request_id)
    thread.join()
    assert ended[-1] == "lost", ended
    assert local.read([10 + i for i in range(6)]) == source.read([3 + i for i in range(6)])
    assert not any(local.read([1, 2]))
    local.fetch(lost, [1, 2])  # its lease is still there
    assert local.read([1, 2]) == source.read([1, 2])


def test_what_becomes_ready_is_sent_without_being_asked_for(
    open_local: Callable[..., PageWorker],
) -> None:
    """Once a pair is up, the answer that says how far the source is also announces the bytes."""
    local, source = open_local(SMALL), open_local(SMALL, Counting)
    source.fill(4)
    where = (source.address, source.incarnation, 6 * SMALL.page_size, 6, SMALL)
    handles = [KVHandle(name, *where) for name in ("a", "b", "c")]
    local.fetch(source.lease("warm", [30]), [30])
    assert source.endpoint.num_asked == 1  # type: ignore[attr-defined]
    pages = {h.request_id: [1 + 6 * i + j for j in range(6)] for i, h in enumerate(handles)}
    threads = [
        threading.Thread(
            target=local.transport.fetch_early, args=(h, pages[h.request_id], 10.0), daemon=True
        )
        for h in handles
    ]
    for name in pages:
        source.leases.promise(name, pages[name], 0)
    for thread in threads:
        thread.start()
    for num_ready in (2, 3, 5):
        for name in pages:
            source.leases.promise(name, pages[name], num_ready)
        time.sleep(0.02)
    for name in pages:
        source.leases.grant(name, pages[name], 6 * SMALL.page_size)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    everything = [page for name in pages for page in pages[name]]
    assert local.read(everything) == source.read(everything)
    assert source.endpoint.num_asked == 1  # type: ignore[attr-defined]
    eventually(lambda: source.held() == {})


def joined(
    open_local: Callable[..., PageWorker], kind: type
) -> tuple[PageWorker, PageWorker, dict[object, object]]:
    """A receiver, a source of that kind, and the source's pairs: theirs is up."""
    local, source = open_local(SMALL), open_local(SMALL, kind)
    source.fill(5)
    local.fetch(source.lease("warm", [30]), [30])
    return local, source, dict(source.endpoint._pairs)


def test_a_source_that_begins_to_send_as_the_wait_for_it_ends_is_heard(
    open_local: Callable[..., PageWorker],
) -> None:
    """Refused then, the bytes would come to nobody and block the pair until their own timeout."""
    local, source, pairs = joined(open_local, SlowToLoad)
    source.endpoint.load_s = 0.6  # type: ignore[attr-defined]
    source.leases.promise("r", [4, 5], 0)
    handle = KVHandle("r", source.address, source.incarnation, 2 * SMALL.page_size, 2, SMALL)
    threading.Timer(0.2, source.leases.grant, ("r", [4, 5], 2 * SMALL.page_size, 77)).start()
    assert local.transport.fetch_early(handle, [1, 2], 0.5).token == 77
    assert local.read([1, 2]) == source.read([4, 5])
    assert source.endpoint._pairs == pairs


def test_what_nobody_waits_for_any_more_is_not_sent(
    open_local: Callable[..., PageWorker],
) -> None:
    """Ready behind a transfer that takes longer: refused in time, and the pair stays good."""
    local, source, pairs = joined(open_local, Slow)
    other = threading.Thread(target=local.fetch, args=(source.lease("other", [31]), [31]))
    other.start()
    time.sleep(0.2)
    source.leases.promise("r", [4, 5], 1)
    handle = KVHandle("r", source.address, source.incarnation, 2 * SMALL.page_size, 2, SMALL)
    with pytest.raises(TransferError, match="makes no progress"):
        local.transport.fetch_early(handle, [1, 2], 0.2)
    other.join(10)
    local.fetch(source.lease("next", [6]), [3], timeout_s=2.0)
    assert local.read([31, 3]) == source.read([31, 6]) and not any(local.read([1, 2]))
    assert source.endpoint._pairs == pairs


def test_pairs_over_the_limit_are_closed_and_opened_again(
    open_local: Callable[..., PageWorker],
) -> None:
    source = open_local(SMALL, max_pairs=1)
    receivers = [open_local(SMALL) for _ in range(3)]
    for i in range(9):
        receivers[i % 3].fetch(source.lease(f"r{i}", [i]), [i])
    assert len(source.endpoint._pairs) == 1
    receiver = open_local(SMALL, max_pairs=1)
    for i in range(6):
        receiver.fetch(receivers[i % 2].lease(f"x{i}", [i]), [i])
    assert len(receiver.transport._pairs) == 1


def test_transfers_leak_no_threads_and_no_descriptors(
    open_local: Callable[..., PageWorker],
) -> None:
    local, source = open_local(SMALL), open_local(SMALL)
    local.fetch(source.lease("first", [0]), [0])
    before = _num_threads(), _num_descriptors()
    for i in range(60):
        if i % 3 == 0:  # a failure, and so a new pair
            with pytest.raises(TransferError):
                local.fetch(replace(source.lease(f"f{i}", [38, 39]), num_pages=1), [0])
            source.leases.release(f"f{i}")
        local.fetch(source.lease(f"r{i}", [i % 30]), [i % 30])
    # 20 pairs with two threads and five descriptors on each side; gRPC may start a few of its own.
    eventually(lambda: _num_threads() <= before[0] + 4 and _num_descriptors() <= before[1] + 4)


def test_close_ends_every_thread(open_local: Callable[..., PageWorker]) -> None:
    local, source = open_local(SMALL), open_local(SMALL, Slow)
    failed: list[TransferError] = []

    def fetch() -> None:
        try:
            local.fetch(source.lease("r", [1]), [1], timeout_s=3)
            local.fetch(source.lease("s", [2]), [2], timeout_s=3)
        except TransferError as error:
            failed.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    time.sleep(0.2)
    local.transport.close()
    thread.join(10)
    assert not thread.is_alive() and len(failed) == 1
    source.endpoint.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-send")]
    with pytest.raises(TransferError, match="closed"):
        local.fetch(source.lease("t", [3]), [3])


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_random_fetches_aborts_and_timeouts_lose_no_page(
    open_local: Callable[..., PageWorker],
) -> None:
    """FAULTS 43: whatever arrives is intact, whatever does not is an error, and all comes home."""
    workers = [open_local(SMALL, max_pairs=2) for _ in range(4)]
    for seed, worker in enumerate(workers):
        worker.fill(seed)
    results: list[str] = []

    def run(seed: int) -> None:
        # Threads 0-7: each leases pages 2 * seed on one worker and fetches into 20 + 2 * seed.
        rng, theirs, ours = random.Random(seed), [2 * seed, 2 * seed + 1], [20 + seed, 30 + seed]
        for i in range(25):
            source, target = rng.sample(workers, 2)
            handle = source.lease(f"{seed}-{i}", theirs)
            if rng.random() < 0.2:
                threading.Thread(target=source.leases.release, args=(handle.request_id,)).start()
            try:
                target.fetch(handle, ours, timeout_s=rng.choice([0.002, 0.01, 5, 5]))
                assert target.read(ours) == source.read(theirs)
                results.append("arrived")
            except TransferError as error:
                target.transport.release(handle)
                results.append(str(error))
            eventually(lambda s=source, name=handle.request_id: name not in s.held())

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8 * 25, "a thread failed"
    assert 80 < results.count("arrived") < 8 * 25
    assert all(worker.held() == {} for worker in workers)
