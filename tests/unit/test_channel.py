"""The stream between a gateway and its workers, both ends real, engines with the FAKE model."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
import torch

from kvtransfer.core.handle import KVHandle, KVLayout
from kvtransfer.leases import Leases
from kvtransfer.loopback import LoopbackNetwork, LoopbackTransport
from protos import evenflow_pb2 as pb
from serving import messages
from serving.channel.gateway import ChannelPools
from serving.channel.worker import Identity, WorkerServer
from serving.pools import Submission, WorkerLost
from workers.core.latency import LatencyModel
from workers.core.output import Load, Output, PromptToken, Timing, Token
from workers.core.pace import Pace
from workers.core.pages import PagePool
from workers.core.policy import Limits
from workers.core.request import SLO, Request, Sampling
from workers.core.scheduler import Scheduler
from workers.engine import Engine, Source
from workers.fake import FakeRunner, fake_token

LAYOUT = KVLayout("made-up", 1, 1, 4, 16, "float32")
NUM_PAGES = 64
VOCAB = 1000


def answer_to(prompt: tuple[int, ...], length: int) -> list[int]:
    return [fake_token(prompt, i, VOCAB) for i in range(length)]


class WorkerUnderTest:
    """A worker process's parts in this process, on a real port."""

    def __init__(self, name: str, role: str = "mixed", network: LoopbackNetwork | None = None):
        self.name, self.role = name, role
        self.network = network or LoopbackNetwork()
        self.executor = FakeRunner(VOCAB)
        self.latency = LatencyModel()
        self.server = WorkerServer(debug=True)

    async def start(self, port: int = 0) -> str:
        self.address = await self.server.bind("127.0.0.1", port)
        leases = Leases(lease_s=5.0)
        pool = torch.zeros(NUM_PAGES, 1, 1, 2, 16, 4)
        incarnation = f"{self.name}-{time.monotonic_ns()}"
        self.engine = Engine(
            self.executor,
            Scheduler(Limits(64, 32), PagePool(NUM_PAGES, 16), latency=self.latency),
            leases,
            LoopbackTransport(self.network, self.address, pool, LAYOUT, incarnation, leases),
            Source(self.address, incarnation, LAYOUT),
            emit=self.server.emit,
        )
        self.engine.start()
        identity = Identity(self.name, incarnation, self.role, 512, NUM_PAGES, 16, VOCAB)
        await self.server.start(self.engine, identity)
        return self.address

    async def stop(self) -> None:
        await self.server.stop()
        await asyncio.to_thread(self.engine.stop)


@asynccontextmanager
async def attached(*workers: WorkerUnderTest, stall_timeout_s: float = 60.0):
    pools = ChannelPools(stall_timeout_s=stall_timeout_s)
    try:
        pools.update({worker.name: await worker.start() for worker in workers})
        await until(lambda: len(pools.workers()) == len(workers))
        yield pools
    finally:
        await pools.close()
        await asyncio.gather(*(worker.stop() for worker in workers))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def until_clean(pools: ChannelPools, worker_id: str, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not (await pools.ledger(worker_id)).is_clean:
            await asyncio.sleep(0.01)


def request(name: str, *prompt: int, max_tokens: int = 8) -> Request:
    return Request(name, prompt, Sampling(max_tokens=max_tokens), arrived_at=time.monotonic())


async def collect(outputs: AsyncIterator[Output]) -> list[Output]:
    return [output async for output in outputs]


def tokens_of(outputs: list[Output]) -> list[int]:
    return [output.token.id for output in outputs if output.token is not None]


async def test_every_request_gets_its_own_tokens_in_order() -> None:
    async with attached(WorkerUnderTest("a"), WorkerUnderTest("b")) as pools:
        requests = [request(f"r{i}", i, i + 1, max_tokens=20) for i in range(24)]
        runs = [collect(pools.submit("ab"[i % 2], Submission(r))) for i, r in enumerate(requests)]
        for r, outputs in zip(requests, await asyncio.gather(*runs), strict=True):
            assert tokens_of(outputs) == answer_to(r.prompt, 20)
            assert outputs[-1].finish_reason == "length" and outputs[0].timing is not None


async def test_a_worker_introduces_itself_with_its_limits() -> None:
    async with attached(WorkerUnderTest("a", "prefill")) as pools:
        (view,) = pools.workers()
    assert (view.id, view.role, view.max_model_len) == ("a", "prefill", 512)
    assert (view.num_pages, view.page_size, view.load.num_pages) == (NUM_PAGES, 16, NUM_PAGES)


async def test_a_request_continues_on_another_worker_with_its_pages() -> None:
    network = LoopbackNetwork()
    prefill = WorkerUnderTest("p", "prefill", network)
    decode = WorkerUnderTest("d", "decode", network)
    async with attached(prefill, decode) as pools:
        r = request("moved", *range(40), max_tokens=12)
        (first,) = await collect(pools.submit("p", Submission(r, hand_off=True)))
        assert first.handle is not None and first.token is not None
        rest = await collect(
            pools.submit("d", Submission(r, output=(first.token.id,), handle=first.handle))
        )
        assert [first.token.id, *tokens_of(rest)] == answer_to(r.prompt, 12)
        assert all(output.fallback is None for output in rest)
        await until_clean(pools, "p")
        await until_clean(pools, "d")


async def run_ahead(pools: ChannelPools, decode: WorkerUnderTest, r: Request) -> Output:
    """Reserve at "d" what "p" computes, and wait until "d" has two tokens more than anybody asked
    it for. The last output of "p"."""
    outputs = pools.submit("p", Submission(r, hand_off=True))
    promise = (await anext(outputs)).promise
    assert promise is not None
    pools.reserve("d", Submission(r, handle=promise, early=True))
    (first,) = await collect(outputs)
    await until(lambda: decode.engine.load().output_tokens >= 2)
    return first


async def test_what_comes_before_the_request_was_submitted_is_told_then_in_order() -> None:
    network = LoopbackNetwork()
    prefill = WorkerUnderTest("p", "prefill", network)
    decode = WorkerUnderTest("d", "decode", network)
    prefill.executor.step_s = 0.02
    async with attached(prefill, decode) as pools:
        for name, first, max_tokens in (("long", 0, 40), ("over", 300, 3)):
            r = request(name, *range(first, first + 200), max_tokens=max_tokens)
            last = await run_ahead(pools, decode, r)
            assert last.handle is not None and last.token is not None
            late = Submission(r, output=(last.token.id,), handle=last.handle)
            rest = await collect(pools.submit("d", late))
            assert [last.token.id, *tokens_of(rest)] == answer_to(r.prompt, max_tokens)
            assert all(output.fallback is None for output in rest)
        assert decode.server.num_requests == 0
        await until_clean(pools, "p")
        await until_clean(pools, "d")


async def test_nothing_goes_on_for_a_gateway_that_vanished_before_it_submitted() -> None:
    network = LoopbackNetwork()
    prefill = WorkerUnderTest("p", "prefill", network)
    decode = WorkerUnderTest("d", "decode", network)
    prefill.executor.step_s = decode.executor.step_s = 0.02
    async with attached(prefill, decode) as pools:
        await run_ahead(pools, decode, request("r", *range(200), max_tokens=300))
        others = ChannelPools()
        others.update({"d": decode.address})
        await until(lambda: bool(others.workers()))
        await pools.close()
        await until_clean(others, "d")
        assert decode.engine.load().running_seqs == 0
        await others.close()


async def test_an_abort_ends_the_request_and_frees_its_pages() -> None:
    worker = WorkerUnderTest("a")
    worker.executor.step_s = 0.01
    async with attached(worker) as pools:
        outputs = pools.submit("a", Submission(request("r", 1, 2, 3, max_tokens=400)))
        assert (await anext(outputs)).token is not None
        pools.abort("a", "r")
        pools.abort("a", "r")
        assert [output async for output in outputs][-1].finish_reason == "abort"
        await until_clean(pools, "a", 1.0)


async def test_an_abort_lets_go_of_a_lease() -> None:
    async with attached(WorkerUnderTest("a")) as pools:
        await collect(pools.submit("a", Submission(request("r", 1, 2), hand_off=True)))
        assert (await pools.ledger("a")).leased == {"r": 1}
        pools.abort("a", "r")
        await until_clean(pools, "a", 1.0)


async def test_a_gateway_that_vanishes_leaves_nothing_running() -> None:
    worker = WorkerUnderTest("a")
    worker.executor.step_s = 0.01
    async with attached(worker) as pools:
        other = ChannelPools()
        other.update({"a": worker.address})
        await until(lambda: bool(other.workers()))
        outputs = other.submit("a", Submission(request("r", 1, 2, max_tokens=400)))
        await anext(outputs)
        await other.close()
        with pytest.raises(WorkerLost):
            await collect(outputs)
        await until_clean(pools, "a", 1.0)
        assert worker.server.num_requests == 0


async def test_streams_of_a_worker_that_dies_are_lost_at_once_and_it_may_come_back() -> None:
    worker, other = WorkerUnderTest("a"), WorkerUnderTest("b")
    worker.executor.step_s = 0.01
    async with attached(worker, other) as pools:
        outputs = pools.submit("a", Submission(request("r", 1, 2, max_tokens=400)))
        await anext(outputs)
        await worker.stop()
        with pytest.raises(WorkerLost, match="a: "):
            await asyncio.wait_for(collect(outputs), 2.0)
        assert [view.id for view in pools.workers()] == ["b"]
        with pytest.raises(WorkerLost):
            await collect(pools.submit("a", Submission(request("r2", 1))))
        port = int(worker.address.rsplit(":")[-1])
        worker = WorkerUnderTest("a")
        await worker.start(port)
        try:
            await until(lambda: len(pools.workers()) == 2)
            again = await collect(pools.submit("a", Submission(request("r", 1, 2))))
            assert tokens_of(again) == answer_to((1, 2), 8)
        finally:
            await worker.stop()


async def test_a_worker_that_left_the_membership_finishes_its_streams_only() -> None:
    worker, other = WorkerUnderTest("a"), WorkerUnderTest("b")
    worker.executor.step_s = 0.01
    async with attached(worker, other) as pools:
        outputs = pools.submit("a", Submission(request("r", 1, 2, max_tokens=30)))
        first = await anext(outputs)
        pools.update({"b": other.address})
        assert [view.id for view in pools.workers()] == ["b"]
        with pytest.raises(WorkerLost):
            await collect(pools.submit("a", Submission(request("r2", 1))))
        rest = await collect(outputs)
        assert tokens_of([first, *rest]) == answer_to((1, 2), 30)
        assert worker.server.num_requests == 0


async def test_a_frozen_worker_is_lost_and_trusted_again_when_it_moves() -> None:
    """FAULTS 39"""
    worker = WorkerUnderTest("a")
    async with attached(worker, stall_timeout_s=1.0) as pools:
        worker.executor.step_s = 2.5
        with pytest.raises(WorkerLost, match="no progress"):
            await collect(pools.submit("a", Submission(request("r", 1, 2, max_tokens=9))))
        assert pools.workers() == []
        worker.executor.step_s = 0.0
        await until(lambda: bool(pools.workers()), 6.0)
        outputs = await collect(pools.submit("a", Submission(request("r2", 1, 2))))
        assert tokens_of(outputs) == answer_to((1, 2), 8)


async def test_a_request_that_the_engine_refuses_ends_alone() -> None:
    async with attached(WorkerUnderTest("a")) as pools:
        good = collect(pools.submit("a", Submission(request("good", 1, 2))))
        too_long = request("long", *([1] * (NUM_PAGES * 16 + 1)))
        bad = collect(pools.submit("a", Submission(too_long)))
        outputs, (refused,) = await asyncio.gather(good, bad)
        assert outputs[-1].finish_reason == "length"
        assert refused.finish_reason == "error" and "do not fit" in (refused.error or "")


async def test_another_worker_on_a_known_port_is_not_taken_for_the_old_one() -> None:
    async with attached(WorkerUnderTest("a")) as pools:
        address = pools._links["a"].address
        pools.update({"a": address, "b": address})
        await asyncio.sleep(0.3)
        assert [view.id for view in pools.workers()] == ["a"]


async def test_load_is_reported_without_a_step() -> None:
    worker = WorkerUnderTest("a")
    async with attached(worker) as pools:
        await collect(pools.submit("a", Submission(request("r", *range(20)), hand_off=True)))
        await until(lambda: pools.workers()[0].load.leased_pages == 2)
        pools.abort("a", "r")
        await until(lambda: pools.workers()[0].load.leased_pages == 0, 2.0)


async def test_the_ledger_is_for_debugging_only() -> None:
    worker = WorkerUnderTest("a")
    worker.server = WorkerServer(debug=False)
    async with attached(worker) as pools:
        with pytest.raises(WorkerLost, match="debug is off"):
            await pools.ledger("a")


async def test_only_processes_of_the_deployment_are_heard() -> None:
    worker = WorkerUnderTest("a")
    worker.server = WorkerServer(debug=True, token="ours")
    address = await worker.start()
    pools = {token: ChannelPools(token=token) for token in ("ours", "theirs", "")}
    try:
        for pool in pools.values():
            pool.update({"a": address})
        await until(lambda: bool(pools["ours"].workers()))
        await asyncio.sleep(0.3)
        assert not pools["theirs"].workers() and not pools[""].workers()
        async with grpc.aio.insecure_channel(address) as channel:
            for method in ("Worker/Attach", "Worker/GetKVLedger", "Pages/Open", "Nothing/None"):
                for metadata in ((), (("x-evenflow-token", "OURS"),), (("x-evenflow-token", ""),)):
                    with pytest.raises(grpc.aio.AioRpcError) as error:
                        call = channel.unary_unary(f"/evenflow.v1.{method}")
                        await call(b"", metadata=metadata, timeout=5)
                    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        await asyncio.gather(*(pool.close() for pool in pools.values()))
        await worker.stop()


async def test_a_taken_port_is_an_error_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="cannot listen"):
            await WorkerServer().bind("127.0.0.1", taken.getsockname()[1])


def test_values_survive_the_wire() -> None:
    sampling = Sampling(
        max_tokens=5,
        min_tokens=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=2**63 + 5,
        allowed_ids=frozenset({3, 4}),
        bad_words=((1, 2), (7,)),
        grammar='{"grammars": []}',
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias=((3, -100.0), (9, 1.5)),
        stop_ids=frozenset({0, 2}),
        logprobs=0,
        prompt_logprobs=2,
    )
    r = Request("r", (1, 2, 3), sampling, SLO(1.5, 0.05), arrived_at=90.0, priority=-3)
    handle = KVHandle("r", "127.0.0.1:1", "inc", 4, 1, LAYOUT)
    sent = Submission(r, output=(7,), hand_off=True, handle=handle)
    seq = messages.sequence_from_wire(messages.submission_to_wire(sent, 100.0), 20.0)
    assert seq.request.arrived_at == pytest.approx(10.0)  # as old on the other clock
    assert seq.request.sampling == sampling and seq.request.slo == r.slo
    assert (seq.request.prompt, seq.request.priority) == (r.prompt, -3)
    assert (seq.output, seq.hand_off, seq.handle) == ([7], True, handle)

    outputs = [
        Output("r", Token(5, -0.5, ((5, -0.5), (6, -1.0))), timing=Timing(0.1, 0.2, 0.3, 4)),
        Output("r", Token(0), "stop"),
        Output("r", Token(4, prompt=(PromptToken(-1.5, 3, ((8, -0.25),)), PromptToken(-2.5, 1)))),
        Output("r", Token(1, -2.0), handle=handle, fallback="TransferError: gone"),
        Output("r", finish_reason="error", error="broken"),
    ]
    for output in outputs:
        assert messages.output_from_wire(messages.output_to_wire(output)) == output
    load = Load(*range(1, 14))
    assert messages.load_from_wire(messages.load_to_wire(load)) == load
    pace = Pace((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), 0.2, 1.5, 1.2, 1e-3, 1e-9, 4096, 8, 9, False, True)
    assert messages.pace_from_wire(messages.pace_to_wire(pace)) == pace
    assert messages.pace_from_wire(pb.Pace(coefficients=[1.0])) is None, "of another release"


async def test_a_worker_says_how_fast_it_is_when_a_gateway_attaches_and_at_each_heartbeat() -> None:
    worker = WorkerUnderTest("a")
    async with attached(worker) as pools:
        await until(lambda: pools.workers()[0].pace is not None)
        assert pools.workers()[0].pace == worker.engine.pace()
        worker.latency.coefficients = (1.0,) * 6
        await until(lambda: pools.workers()[0].pace == worker.engine.pace())


async def test_a_gateway_that_was_frozen_itself_loses_no_worker() -> None:
    """FAULTS 75: silence counts only while somebody listened."""
    worker = WorkerUnderTest("a")
    worker.executor.step_s = 0.01
    async with attached(worker, stall_timeout_s=1.0) as pools:
        outputs = pools.submit("a", Submission(request("r", 1, 2, max_tokens=60)))
        first = await anext(outputs)
        time.sleep(2.0)  # the loop that both ends of the stream run on
        assert tokens_of([first, *await collect(outputs)]) == answer_to((1, 2), 60)
