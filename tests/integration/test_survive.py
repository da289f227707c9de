"""Streams that outlive their workers, and clients that leave nothing: T0 on real engines."""

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.processes import Deployment, call, deployed

pytestmark = pytest.mark.cluster

ROLES = {"p": "prefill", "d": "decode", "spare": "mixed"}
PROMPT = tuple(range(300, 700))


async def cut(deployment: Deployment, victim: str, after: int) -> tuple[list[int], list[int], str]:
    """A stream of 64 tokens whose ``victim`` stops after so many; its tokens, its indexes of
    choices, and what is said of a fallback."""
    generation = call("r", PROMPT, 64, "disaggregated", pinned=("p", "d"))
    tokens, indexes, fallback = [], [], ""
    stopping = None
    async with aclosing(deployment.gateway.generate(generation)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            indexes.append(delta.index)
            if len(tokens) >= after and stopping is None:
                stopping = asyncio.create_task(deployment.workers[victim].stop())
            if delta.final is not None:
                fallback = delta.final.trace.fallback
                assert delta.final.usage.completion_tokens == 64
    assert stopping is not None
    await stopping
    return tokens, indexes, fallback


@pytest.mark.parametrize("after", [1, 2, 17, 63])
@pytest.mark.parametrize("victim", ["d", "p"])
async def test_a_stream_outlives_its_worker(
    t0_with_tokenizer: Path, victim: str, after: int
) -> None:
    """FAULTS 65, 67: 64 tokens, the same, counted once, wherever it was cut."""
    async with deployed(t0_with_tokenizer, ROLES) as deployment:  # type: ignore[arg-type]
        alone = await deployment.generate(call("alone", PROMPT, 64, "mixed"))
        tokens, indexes, _ = await cut(deployment, victim, after)
        assert tokens == alone.tokens and set(indexes) == {0}
        del deployment.workers[victim]
        async with asyncio.timeout(5):
            while len(deployment.pools.workers()) > 2:
                await asyncio.sleep(0.02)
        await deployment.until_clean(15.0)


async def test_nothing_runs_on_of_clients_that_leave_at_once(t0_with_tokenizer: Path) -> None:
    """FAULTS 77, 101: 200 streams closed within 20 ms; loads are true without a new request."""
    rng = random.Random(6)
    async with deployed(t0_with_tokenizer, {"p": "prefill", "d": "decode"}) as deployment:

        async def leave(i: int) -> None:
            mode = rng.choice(["mixed", "disaggregated"])
            task = asyncio.create_task(deployment.generate(call(f"r{i}", PROMPT, 400, mode)))
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for start in range(0, 200, 20):
            await asyncio.gather(*(leave(start + i) for i in range(20)))
        await deployment.until_clean()
        async with asyncio.timeout(2):
            while any(
                view.load.running_seqs or view.load.waiting_seqs or view.load.leased_pages
                for view in deployment.pools.workers()
            ):
                await asyncio.sleep(0.02)
        assert all(worker._server.num_requests == 0 for worker in deployment.workers.values())
