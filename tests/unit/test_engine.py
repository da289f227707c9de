"""The engine: whatever reaches it ends in an answer, and every page comes home."""

import queue
import random
import time
from dataclasses import dataclass, field

import pytest
import torch

from kvtransfer.core.handle import KVHandle
from kvtransfer.leases import Leases
from kvtransfer.loopback import LoopbackNetwork, LoopbackTransport
from tests.stepper import LAYOUT, request
from workers.core.output import Output, Report, Token
from workers.core.pages import PagePool
from workers.core.policy import Limits
from workers.core.request import Request, Sequence
from workers.core.scheduler import Scheduler
from workers.engine import MAX_FAILED_STEPS, Engine, Source
from workers.fake import FakeRunner, fake_token


class TamperedRunner(FakeRunner):
    """Does once what the test asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.bad_token: tuple[str, int] | None = None
        self.failures = 0

    def run(self, chunks):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("planted")
        tokens = super().run(chunks)
        if self.bad_token and self.bad_token[0] in tokens:
            tokens[self.bad_token[0]] = Token(self.bad_token[1])
        return tokens


@dataclass
class Worker:
    """An engine on a loopback network, and what it has told."""

    network: LoopbackNetwork
    address: str = "w0"
    num_pages: int = 64
    limits: Limits = field(default_factory=lambda: Limits(64, 8))
    lease_s: float = 10.0

    def __post_init__(self) -> None:
        self.runner = TamperedRunner()
        self.leases = Leases(self.lease_s)
        pool = torch.zeros(self.num_pages, 2, 2, 2, 16, 16)
        self.transport = LoopbackTransport(
            self.network, self.address, pool, LAYOUT, "i0", self.leases
        )
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.outputs: dict[str, list[Output]] = {}
        self.promises: dict[str, KVHandle] = {}
        self.engine = Engine(
            self.runner,
            Scheduler(self.limits, PagePool(self.num_pages, 16)),
            self.leases,
            self.transport,
            Source(self.address, "i0", LAYOUT),
            emit=self.reports.put,
            transfer_timeout_s=2.0,
        )
        self.engine.start()

    def submit(self, req: Request, **kwargs) -> None:
        self.engine.submit(Sequence(req, **kwargs))

    def wait_for(self, *names: str, timeout_s: float = 10.0) -> None:
        """Read reports until each named request has ended here."""
        deadline = time.monotonic() + timeout_s
        while not all(self.outputs.get(n) and self.outputs[n][-1].is_last for n in names):
            self.read(deadline - time.monotonic())

    def read(self, timeout_s: float = 10.0) -> None:
        for output in self.reports.get(timeout=timeout_s).outputs:
            if output.promise is not None:
                self.promises[output.request_id] = output.promise
            else:
                self.outputs.setdefault(output.request_id, []).append(output)

    def tokens(self, name: str) -> list[int]:
        return [o.token.id for o in self.outputs[name] if o.token is not None]

    def assert_clean(self) -> None:
        deadline = time.monotonic() + 3
        while not (ledger := self.engine.ledger()).is_clean:
            assert time.monotonic() < deadline, ledger
            time.sleep(0.01)


def expected(req: Request) -> list[int]:
    return [fake_token(req.prompt, i, 49152) for i in range(req.sampling.max_tokens)]


@pytest.fixture
def workers():
    """A pair; their pools must be whole at the end of every test (FAULTS 43)."""
    network = LoopbackNetwork()
    pair = Worker(network, "w0"), Worker(network, "w1")
    yield pair
    for worker in pair:
        worker.assert_clean()
        worker.engine.stop()


def test_tokens_come_one_report_per_step(workers):
    worker, _ = workers
    requests = [request(str(i), 40 + i, 10) for i in range(5)]
    for req in requests:
        worker.submit(req)
    worker.wait_for(*"01234")
    for req in requests:
        assert worker.tokens(req.id) == expected(req)
        assert worker.outputs[req.id][-1].finish_reason == "length"
        assert worker.outputs[req.id][0].timing is not None


def test_an_unfinished_prefill_tells_nothing(workers):
    """FAULTS 1: a 300-token prompt in chunks of 64 gives exactly its 8 tokens, no dummies."""
    worker, _ = workers
    worker.submit(request("long", 300, 8))
    worker.wait_for("long")
    assert len(worker.outputs["long"]) == 8
    assert all(output.token is not None for output in worker.outputs["long"])
    assert worker.engine.load().step >= 5 + 7


def test_a_request_moves_to_another_worker_and_goes_on(workers):
    source, target = workers
    req = request("moved", 100, 10)
    source.submit(req, hand_off=True)
    source.wait_for("moved")
    [first] = source.outputs["moved"]
    assert first.handle is not None and first.handle.num_tokens == 100
    target.submit(req, output=[first.token.id], handle=first.handle)
    target.wait_for("moved")
    assert source.tokens("moved") + target.tokens("moved") == expected(req)
    assert target.outputs["moved"][0].fallback is None


def test_a_failed_transfer_becomes_a_recompute_that_says_so(workers):
    source, target = workers

    def broken(moment, handle):
        raise ConnectionError("planted")

    target.transport.fault = broken
    req = request("moved", 100, 10)
    source.submit(req, hand_off=True)
    source.wait_for("moved")
    [first] = source.outputs["moved"]
    target.submit(req, output=[first.token.id], handle=first.handle)
    target.wait_for("moved")
    assert source.tokens("moved") + target.tokens("moved") == expected(req)
    assert "planted" in target.outputs["moved"][0].fallback
    assert all(output.fallback is None for output in target.outputs["moved"][1:])


def test_max_tokens_one_is_never_handed_off(workers):
    """FAULTS 19: no page is ever taken on a second worker."""
    source, _ = workers
    source.submit(request("one", 100, 1), hand_off=True)
    source.wait_for("one")
    [only] = source.outputs["one"]
    assert only.handle is None and only.finish_reason == "length"


def test_abort_between_the_two_workers_frees_the_lease(workers):
    source, _ = workers
    source.submit(request("gap", 100, 10), hand_off=True)
    source.wait_for("gap")
    assert source.engine.ledger().leased == {"gap": 7}
    source.engine.abort("gap")
    source.assert_clean()


def test_a_lease_nobody_wants_expires():
    worker = Worker(LoopbackNetwork(), lease_s=0.2)
    worker.submit(request("lost", 100, 10), hand_off=True)
    worker.wait_for("lost")
    worker.assert_clean()
    worker.engine.stop()


def test_a_lease_is_kept_while_its_receiver_waits_for_room(workers):
    network = LoopbackNetwork()
    source = Worker(network, "s", lease_s=0.6)
    target = Worker(network, "t", limits=Limits(64, 1), lease_s=0.6)
    target.runner.step_s = 0.02
    target.submit(request("busy", 10, 50))
    req = request("moved", 50, 5)
    source.submit(req, hand_off=True)
    source.wait_for("moved")
    [first] = source.outputs["moved"]
    target.submit(req, output=[first.token.id], handle=first.handle)
    target.wait_for("moved")
    assert target.outputs["moved"][0].fallback is None, "it waited 1 s with a lease of 0.6 s"
    for worker in (source, target):
        worker.assert_clean()
        worker.engine.stop()


def test_a_bad_token_ends_one_request_only(workers):
    """FAULTS 15: ids above the vocabulary and below zero."""
    worker, _ = workers
    for bad in (60000, -1):
        worker.runner.bad_token = ("victim", bad)
        requests = [request(f"{bad}-{i}", 20, 12) for i in range(5)]
        for req in [request("victim", 20, 12), *requests]:
            worker.submit(req)
        worker.wait_for("victim", *(req.id for req in requests))
        assert worker.outputs["victim"][-1].finish_reason == "error"
        assert str(bad) in worker.outputs["victim"][-1].error
        for req in requests:
            assert worker.tokens(req.id) == expected(req)
        assert worker.engine.is_healthy
        worker.outputs.clear()


def test_a_failed_step_ends_its_requests_and_not_the_worker(workers):
    worker, _ = workers
    worker.runner.failures = 1
    worker.submit(request("hit", 20, 12))
    worker.wait_for("hit")
    assert worker.outputs["hit"][-1].finish_reason == "error"
    assert "planted" not in worker.outputs["hit"][-1].error, "causes belong in the log"
    worker.submit(request("next", 20, 12))
    worker.wait_for("next")
    assert worker.outputs["next"][-1].finish_reason == "length" and worker.engine.is_healthy


def test_a_worker_whose_steps_keep_failing_says_so(workers):
    worker, _ = workers
    worker.runner.failures = MAX_FAILED_STEPS
    for i in range(MAX_FAILED_STEPS):
        worker.submit(request(str(i), 20, 12))
        worker.wait_for(str(i))
    assert not worker.engine.is_healthy


def test_what_cannot_run_here_is_answered_with_the_reason(workers):
    """FAULTS 27: longer than the pool, and an id in use."""
    worker, _ = workers
    worker.submit(request("huge", 2000))
    worker.wait_for("huge")
    assert "2000 tokens do not fit" in worker.outputs["huge"][-1].error


def test_stop_answers_what_is_still_running():
    worker = Worker(LoopbackNetwork())
    worker.runner.step_s = 0.01
    worker.submit(request("open", 20, 1000))
    time.sleep(0.1)
    worker.engine.stop()
    worker.wait_for("open")
    assert worker.outputs["open"][-1].finish_reason == "error"
    worker.submit(request("late", 20, 10))
    worker.wait_for("late")
    assert worker.outputs["late"][-1].error == "this worker has stopped"


def test_a_fault_in_the_loop_answers_everybody(workers):
    """Whatever breaks, no request waits for ever, and the worker says that it is ill."""
    worker = Worker(LoopbackNetwork())

    def broken(plan, sampled):
        raise AssertionError("planted")

    worker.submit(request("runs", 20, 10))
    worker.wait_for("runs")
    worker.engine._scheduler.commit = broken
    worker.submit(request("hit", 20, 10))
    worker.wait_for("hit")
    worker.submit(request("late", 20, 10))
    worker.wait_for("late")
    for name in ("hit", "late"):
        assert worker.outputs[name][-1].finish_reason == "error"
    assert not worker.engine.is_healthy


def test_a_thousand_requests_with_random_aborts_leak_nothing(workers):
    """Done 7 with FAKE tokens: half of them disaggregated, aborts in any phase."""
    rng = random.Random(3)
    source, target = workers
    ended: set[str] = set()
    names = [str(i) for i in range(1000)]
    for name in names:
        source.submit(
            request(name, rng.randint(1, 150), rng.randint(1, 12)), hand_off=rng.random() < 0.5
        )
        if rng.random() < 0.2:
            source.engine.abort(str(rng.randint(0, int(name))))
    deadline = time.monotonic() + 60
    moved: set[str] = set()
    while len(ended) < len(names):
        assert time.monotonic() < deadline, sorted(set(names) - ended)[:5]
        for worker in (source, target):
            try:
                report = worker.reports.get(timeout=0.001)
            except queue.Empty:
                continue
            for output in report.outputs:
                if output.handle is not None:
                    moved.add(output.request_id)
                    req = request(output.request_id, output.handle.num_tokens, 12)
                    target.submit(req, output=[output.token.id], handle=output.handle)
                    if rng.random() < 0.2:
                        target.engine.abort(output.request_id)
                elif output.is_last:
                    ended.add(output.request_id)
    assert len(moved) > 200
