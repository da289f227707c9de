"""Pages that move while the rest of the prompt is computed: in time, never wrong, never kept."""

import time

import pytest

from kvtransfer.core.promises import Promises
from kvtransfer.leases import Leases
from kvtransfer.loopback import LoopbackNetwork
from kvtransfer.transport import TransferError
from tests.stepper import request
from tests.unit.test_engine import Worker, expected
from workers.core.policy import Limits
from workers.core.request import Request


@pytest.fixture
def workers():
    """A source that takes its time and a target; their pools must be whole at the end."""
    network = LoopbackNetwork()
    pair = Worker(network, "s"), Worker(network, "t")
    pair[0].runner.step_s = 0.02
    yield pair
    for worker in pair:
        worker.assert_clean()
        worker.engine.stop()


def promised(source: Worker, req: Request) -> None:
    """Submit it for a hand-off and wait until its pages are promised."""
    source.submit(req, hand_off=True)
    deadline = time.monotonic() + 5
    while req.id not in source.promises:
        assert time.monotonic() < deadline
        source.read()


def holds(worker: Worker, name: str) -> int:
    return worker.engine.ledger().owned.get(name, 0)


def go_on(source: Worker, target: Worker, req: Request) -> list[int]:
    source.wait_for(req.id)
    [first] = source.outputs[req.id]
    target.submit(req, output=[first.token.id], handle=first.handle)
    target.wait_for(req.id)
    return source.tokens(req.id) + target.tokens(req.id)


def test_pages_move_before_the_first_token(workers):
    source, target = workers
    req = request("early", 500, 10)
    promised(source, req)
    target.submit(req, handle=source.promises["early"], is_early=True)
    assert holds(target, "early") == 32, "room was taken at once"
    assert go_on(source, target, req) == expected(req)
    last = target.outputs["early"][0]
    assert last.fallback is None and last.timing.transfer_s < 0.1


def test_nobody_is_promised_what_ends_with_its_first_token(workers):
    """FAULTS 19: no page is taken on a decode worker for max_tokens=1."""
    source, _ = workers
    source.submit(request("one", 300, 1), hand_off=True)
    source.wait_for("one")
    assert not source.promises


def test_without_room_the_pages_come_late(workers):
    source, _ = workers
    target = Worker(LoopbackNetwork(), "full")
    target.transport._network = source.network
    target.runner.step_s = 0.005
    target.submit(request("big", 900, 40))
    req = request("late", 500, 10)
    promised(source, req)
    target.submit(req, handle=source.promises["late"], is_early=True)
    assert holds(target, "late") == 0
    assert go_on(source, target, req) == expected(req)
    assert target.outputs["late"][0].fallback is None
    target.wait_for("big")
    target.assert_clean()
    target.engine.stop()


@pytest.mark.parametrize("first", ["source", "target"])
def test_an_abort_frees_both_sides(workers, first):
    """FAULTS 51, 55: also while pages are on their way."""
    source, target = workers
    req = request("gone", 900, 10)
    promised(source, req)
    target.submit(req, handle=source.promises["gone"], is_early=True)
    for worker in (source, target) if first == "source" else (target, source):
        worker.engine.abort("gone")


def test_a_source_that_is_preempted_is_computed_again_and_fetched_late(workers):
    _, target = workers
    source = Worker(workers[0].network, "small", limits=Limits(64, 1))
    source.runner.step_s = 0.02
    req = request("low", 500, 10, priority=5)
    promised(source, req)
    target.submit(req, handle=source.promises["low"], is_early=True)
    assert holds(target, "low")
    urgent = request("urgent", 40, 4, priority=1)
    source.submit(urgent)
    source.wait_for("urgent")
    deadline = time.monotonic() + 3
    while holds(target, "low"):
        assert time.monotonic() < deadline, "the reservation outlives its promise"
    assert go_on(source, target, req) == expected(req)
    assert target.outputs["low"][0].fallback is None
    source.assert_clean()
    source.engine.stop()


def test_a_failed_early_fetch_leaves_the_late_one(workers):
    source, target = workers
    req = request("r", 400, 6)
    failed = []

    def fail(*_: object) -> None:
        failed.append(1)
        raise TransferError("planted")

    fetch_early, target.transport.fetch_early = target.transport.fetch_early, fail
    promised(source, req)
    target.submit(req, handle=source.promises["r"], is_early=True)
    assert go_on(source, target, req) == expected(req) and failed
    assert target.outputs["r"][0].fallback is None
    target.transport.fetch_early = fetch_early


def test_a_source_that_stops_making_progress_is_given_up(workers):
    """FAULTS 61."""
    source, target = workers
    target.engine._transfer_timeout_s = 0.2
    req = request("slow", 400, 6)
    promised(source, req)
    source.runner.step_s = 0.6
    target.submit(req, handle=source.promises["slow"], is_early=True)
    time.sleep(0.5)
    assert holds(target, "slow") == 0
    source.runner.step_s = 0.0
    assert go_on(source, target, req) == expected(req)


def test_what_was_copied_while_a_promise_was_revoked_does_not_count():
    """FAULTS 49: the pages may be somebody else's by then."""
    promises = Promises()
    promises.make("r", [4, 7, 9], 2)
    assert promises.ready("r", 3) is None
    pages = promises.ready("r", 2)
    assert pages == (4, 7) and promises.holds("r", pages)
    promises.revoke("r")
    assert not promises.holds("r", pages)
    promises.make("r", [7, 4, 9], 2)
    assert not promises.holds("r", pages), "promised anew, with other pages"


def test_who_waits_for_pages_is_told_of_progress_and_of_the_end():
    leases = Leases(10.0)
    assert leases.ready("nobody", 0).result(0) is None
    leases.promise("r", [1, 2, 3], 1)
    assert leases.ready("r", 0).result(0).num_pages == 1
    waiting = leases.ready("r", 1)
    assert not waiting.done()
    leases.promise("r", [1, 2, 3], 2)
    assert waiting.result(0).num_pages == 2 and not waiting.result(0).is_complete
    last, dropped = leases.ready("r", 2), leases.ready("r", 2)
    dropped.cancel()
    leases.grant("r", [1, 2, 3], 48)
    assert last.result(0).is_complete and last.result(0).num_pages == 3
    assert leases.holds("r", (1, 2)) and not leases.holds("r", (2,))
    leases.release("r")
    assert leases.ready("r", 0).result(0) is None


def run_ahead(source: Worker, target: Worker, req: Request, num_tokens: int) -> None:
    """The target computes so many tokens before anybody has submitted the request there."""
    promised(source, req)
    target.submit(req, handle=source.promises[req.id], is_early=True)
    source.wait_for(req.id)
    deadline = time.monotonic() + 5
    while len(target.outputs.get(req.id, [])) < num_tokens:
        target.read(deadline - time.monotonic())


@pytest.mark.parametrize("num_tokens", [2, 10])
def test_the_token_comes_with_the_pages(workers, num_tokens):
    """Also when all of it is over before the gateway has said a word."""
    source, target = workers
    req = request("ahead", 500, num_tokens)
    run_ahead(source, target, req, num_tokens - 1)
    assert go_on(source, target, req) == expected(req)
    assert [o.fallback for o in target.outputs["ahead"]] == [None] * (num_tokens - 1)
    assert target.outputs["ahead"][-1].finish_reason == "length"


def test_an_abort_ends_what_is_ahead(workers):
    source, target = workers
    target.runner.step_s = 0.005
    run_ahead(source, target, request("gone", 300, 400), 2)
    target.engine.abort("gone")
    target.wait_for("gone")
    again = request("gone", 40, 3)
    target.outputs.clear()
    target.submit(again)
    target.wait_for("gone")
    assert target.tokens("gone") == expected(again)


def test_what_is_ahead_can_be_asked_to_leave(workers):
    source, target = workers
    target.runner.step_s = 0.005
    req = request("leaves", 300, 400)
    run_ahead(source, target, req, 2)
    [first] = source.outputs["leaves"]
    target.submit(req, output=[first.token.id], handle=first.handle, hand_off=True)
    target.wait_for("leaves")
    handle = target.outputs["leaves"][-1].handle
    tokens = source.tokens("leaves") + target.tokens("leaves")
    assert handle is not None and tokens == expected(req)[: handle.num_tokens - 300 + 1]
    target.engine.abort("leaves")
