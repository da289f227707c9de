"""Situations in which other systems broke, on the live gateway and live engines in virtual time."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bench.calls import Answer, ask
from bench.sim.live import LiveCluster, Timing
from bench.sim.loop import run
from bench.sim.paged import VOCAB, answer
from serving.errors import RequestFailed
from workers.core.policy import Limits

Scene = Callable[[LiveCluster], Coroutine[Any, Any, None]]


def play(scene: Scene, timing: Timing | None = None, **options: Any) -> None:
    async def whole() -> None:
        cluster = LiveCluster(timing or Timing(), **options)
        try:
            await cluster.ready()
            await scene(cluster)
        finally:
            await cluster.close()

    run(whole())


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.0005)


async def gone(task: "asyncio.Task[Any]") -> None:
    """The client leaves."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_client_that_leaves_between_the_two_workers() -> None:
    """FAULTS 57: the gateway stands still after the prefill worker's answer; the client goes."""

    async def scene(cluster: LiveCluster) -> None:
        task = asyncio.create_task(ask(cluster.gateway, "r", prompt(1, 200), 20))
        await until(lambda: "r" in cluster.workers["p"].process.leases.held())
        cluster.meddler.hold(1.0)
        await asyncio.sleep(0.3)
        left_at = now()
        await gone(task)
        await cluster.until_clean(2.0)
        assert now() - left_at < 2.0 < cluster.timing.lease_s

    play(scene)


def test_a_request_that_waits_for_half_a_minute_keeps_its_lease() -> None:
    """FAULTS 57: renewed by the decode worker from the moment it queues the request."""

    async def scene(cluster: LiveCluster) -> None:
        plug = asyncio.create_task(
            ask(cluster.gateway, "plug", prompt(2, 20), 1000, "mixed", ("d",))
        )
        await asyncio.sleep(0.1)
        said = await ask(cluster.gateway, "r", prompt(3, 200), 8, pinned=("p", "d"))
        assert said.tokens == answer(prompt(3, 200), 8) and said.trace.fallback == ""
        assert said.longest_gap_s > 29
        assert (await plug).tokens == answer(prompt(2, 20), 1000)

    play(scene, Timing(step_s=0.03, lease_s=10.0), limits={"d": Limits(64, 1)})


def test_an_aborted_receive_whose_sender_died_gives_its_pages_back() -> None:
    """FAULTS 59: abort, and SIGKILL of the sender, while pages are on their way."""

    async def scene(cluster: LiveCluster) -> None:
        task = asyncio.create_task(ask(cluster.gateway, "r", prompt(4, 400), 20, pinned=("p", "d")))
        await until(lambda: "r" in cluster.pages.carried)
        cluster.kill("p")
        await gone(task)
        target = cluster.workers["d"].engine
        assert target.ledger().owned.get("r"), "reserved for as long as something may be written"
        killed_at = now()
        await until(lambda: target.ledger().is_clean)
        assert now() - killed_at < 5.0
        await cluster.ready()
        said = await ask(cluster.gateway, "next", prompt(5, 400), 20, pinned=("p", "d"))
        assert said.tokens == answer(prompt(5, 400), 20) and said.trace.fallback == ""

    play(scene, Timing(page_s=0.03), early_fetch=False)


def test_a_client_that_leaves_when_the_receiver_has_no_room() -> None:
    """FAULTS 55, 71: the decode worker forgot the early request, so only the prefill worker has
    pages of it; both are told all the same."""

    async def scene(cluster: LiveCluster) -> None:
        plug = asyncio.create_task(ask(cluster.gateway, "plug", prompt(6, 700), 8, "mixed", ("d",)))
        await asyncio.sleep(0.08)
        task = asyncio.create_task(ask(cluster.gateway, "r", prompt(7, 600), 20, pinned=("p", "d")))
        source, target = (cluster.workers[name].engine for name in "pd")
        await until(lambda: source.ledger().owned.get("r"))
        await asyncio.sleep(0.03)
        assert not target.ledger().owned.get("r") and source.ledger().owned.get("r")
        await gone(task)
        await until(lambda: source.ledger().is_clean, 0.05)
        await plug

    play(scene, num_pages=48)


def test_a_slow_network_is_not_taken_for_corruption() -> None:
    """FAULTS 69: 32 at a time, ten rounds, each message 20 ms late: nothing fails a check."""

    async def scene(cluster: LiveCluster) -> None:
        for round in range(10):
            prompts = [prompt(100 * round + i, 40 + 3 * i) for i in range(32)]
            calls = (ask(cluster.gateway, f"{round}-{i}", p, 6) for i, p in enumerate(prompts))
            for said, p in zip(await asyncio.gather(*calls), prompts, strict=True):
                assert said.tokens == answer(p, 6)
                assert said.trace.fallback == "" and said.trace.outcome == "length"
        await cluster.until_clean(0.5)

    times = Timing(latency_s=0.02, page_s=0.002, transfer_timeout_s=5.0)
    play(scene, times, num_pages=1024, limits=dict.fromkeys("pd", Limits(64, 32)))


def test_bursts_with_cancellations_wedge_nothing() -> None:
    """FAULTS 71: a tenth leaves, and of a burst of long prompts every second one."""
    rng = random.Random(71)

    async def scene(cluster: LiveCluster) -> None:
        async def client(name: str, length: int, leaves: float) -> None:
            said = prompt(rng.randrange(10**9), length)
            task = asyncio.create_task(ask(cluster.gateway, name, said, 12, "auto"))
            if rng.random() < leaves:
                await asyncio.sleep(rng.random() * 2)
                await gone(task)
            else:
                assert (await task).tokens == answer(said, 12)

        async def steady(number: int) -> None:
            turn = 0
            while now() < 120:
                await client(f"{number}-{turn}", rng.randint(20, 200), 0.1)
                turn += 1

        async def bursts() -> None:
            for start in (20, 60, 100):
                await asyncio.sleep(start - now())
                await asyncio.gather(*(client(f"{start}-b{i}", 700, 0.5) for i in range(32)))

        await asyncio.gather(bursts(), *(steady(i) for i in range(8)))
        for i in range(5):
            async with asyncio.timeout(30):
                said = await ask(cluster.gateway, f"canary-{i}", prompt(i, 100), 10)
            assert said.tokens == answer(prompt(i, 100), 10)
        await cluster.until_clean(0.5)

    play(scene, Timing(step_s=0.1, transfer_timeout_s=5.0))


@pytest.mark.parametrize("mode", ["mixed", "disaggregated"])
def test_a_late_answer_is_not_a_second_one(mode: str) -> None:
    """FAULTS 73: the worker accepts, freezes beyond the stall timeout, and answers after all."""

    async def scene(cluster: LiveCluster) -> None:
        victim = "d" if mode == "disaggregated" else "spare"
        pinned = ("p", "d") if mode == "disaggregated" else ("spare",)
        said = Answer()
        task = asyncio.create_task(
            ask(cluster.gateway, "r", prompt(8, 100), 20, mode, pinned, said)
        )
        await until(lambda: len(said.tokens) >= 5)
        cluster.freeze(victim, 3 * cluster.timing.stall_timeout_s)
        await task
        assert said.tokens == answer(prompt(8, 100), 20)
        assert said.usage is not None and said.usage.completion_tokens == 20
        assert "lost" in said.trace.fallback
        await cluster.ready()  # it has thawed
        await until(lambda: cluster.workers[victim].engine.ledger().is_clean, 1.0)
        assert cluster.gateway.num_calls == 0
        views = cluster.pools.workers
        await until(lambda: not any(view.load.running_seqs for view in views()), 1.0)

    play(scene)


def test_an_error_of_the_model_is_not_tried_elsewhere() -> None:
    """FAULTS 73, 89: a failed step ends its request with an error, once."""

    async def scene(cluster: LiveCluster) -> None:
        worker, said = cluster.workers["spare"], Answer()
        task = asyncio.create_task(
            ask(cluster.gateway, "r", prompt(9, 100), 20, "mixed", ("spare",), said)
        )
        await until(lambda: len(said.tokens) >= 5)
        worker.process.model.fails = True
        with pytest.raises(RequestFailed, match="failed on its worker"):
            await task
        worker.process.model.fails = False
        assert said.tokens == answer(prompt(9, 100), 20)[: len(said.tokens)]
        assert (await cluster.gateway.explain("r") or {})["workers"] == ["spare"]
        await cluster.until_clean(0.5)

    play(scene)


def test_workers_killed_again_and_again_cost_no_call() -> None:
    """FAULTS 81: one every 5 s for two minutes, 4 requests a second."""
    rng = random.Random(81)

    async def scene(cluster: LiveCluster) -> None:
        failed: list[str] = []

        async def call(number: int) -> None:
            said = prompt(number, 60)
            try:
                async with asyncio.timeout(30):
                    got = await ask(cluster.gateway, str(number), said, 20, "auto")
                assert got.tokens == answer(said, 20)
            except RequestFailed as error:
                failed.append(error.message)

        async def killer() -> None:
            while now() < 120:
                await asyncio.sleep(5)
                cluster.kill(rng.choice(list(cluster.workers)))

        killing, calls = asyncio.create_task(killer()), []
        for number in range(480):
            calls.append(asyncio.create_task(call(number)))
            await asyncio.sleep(rng.expovariate(4))
        await asyncio.gather(killing, *calls)
        assert len(failed) <= 4, failed
        await cluster.ready()
        failed.clear()
        await asyncio.gather(*(call(1000 + i) for i in range(20)))
        assert not failed
        await cluster.until_clean(cluster.timing.lease_s + 2)

    play(scene)


@pytest.mark.parametrize("seed", range(8))
def test_streams_survive_whatever_happens_at_once(seed: int) -> None:
    """FAULTS 49, 51, 53, 55, 65, 67: kills, freezes, lost and broken messages and pages, moves,
    flips, drains and clients that leave, many times above nature."""
    rng = random.Random(seed)

    async def scene(cluster: LiveCluster) -> None:
        names = [f"c{i}" for i in range(24)]

        async def client(name: str) -> None:
            said, num = prompt(rng.randrange(10**9), rng.randint(20, 400)), rng.randint(1, 40)
            mode = rng.choice(["auto", "disaggregated", "mixed"])
            await asyncio.sleep(rng.random() * 4)
            task = asyncio.create_task(ask(cluster.gateway, name, said, num, mode))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random())
                await gone(task)
                return
            with contextlib.suppress(RequestFailed):  # three workers lost, or none left
                assert (await task).tokens == answer(said, num), name

        async def trouble() -> None:
            while True:
                await asyncio.sleep(rng.expovariate(6))
                victim = rng.choice(list(cluster.workers))
                kind = rng.choice(["drop", "duplicate", "delay", "corrupt"])
                match rng.randrange(9):
                    case 0:
                        cluster.kill(victim)
                    case 1:
                        cluster.freeze(victim, rng.random() * 4)
                    case 2 | 3:
                        cluster.pages.arm(kind)
                    case 4:
                        cluster.meddler.arm(kind, rng.choice(names))
                    case 5:
                        cluster.pools.set_role(victim, rng.choice(["mixed", "prefill", "decode"]))
                    case _:
                        with contextlib.suppress(RequestFailed):
                            cluster.gateway.move(rng.choice(names), victim)

        troubles = asyncio.create_task(trouble())
        try:
            async with asyncio.timeout(120):
                await asyncio.gather(*(client(name) for name in names))
        finally:
            await gone(troubles)
        cluster.meddler.disarm()
        cluster.pages.disarm()
        await cluster.ready()
        await cluster.until_clean(4 * cluster.timing.lease_s + 2)

    play(scene, num_pages=rng.choice([48, 256]), prefix_caching=rng.random() < 0.7)
