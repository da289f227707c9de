"""Pages that move while they are computed, over real pairs and channels: T0, identical tokens."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.processes import call, deployed

pytestmark = pytest.mark.cluster


async def test_long_prompts_move_early_and_say_the_same(t0_with_tokenizer: Path) -> None:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(3, 49152) for _ in range(n)) for n in (40, 200, 777, 1500)]
    roles = {"p": "prefill", "d": "decode"}
    async with deployed(t0_with_tokenizer, roles) as deployment:  # type: ignore[arg-type]

        async def answers(mode: str) -> list[list[int]]:
            calls = (call(f"{mode}{i}", p, 20, mode) for i, p in enumerate(prompts))
            done = await asyncio.gather(*(deployment.generate(c) for c in calls))
            assert all(a.final and a.final.trace.fallback == "" for a in done)
            return [a.tokens for a in done]

        mixed = await answers("mixed")
        for _ in range(5):
            assert await answers("disaggregated") == mixed
        await deployment.until_clean()


async def test_clients_that_leave_while_pages_move_leave_nothing(t0_with_tokenizer: Path) -> None:
    """FAULTS 55, 77: 100 streams of 1,000 tokens, each closed at a random moment."""
    rng = random.Random(2)
    roles = {"p": "prefill", "d": "decode"}
    async with deployed(t0_with_tokenizer, roles) as deployment:  # type: ignore[arg-type]

        async def leave(i: int) -> None:
            prompt = tuple(rng.randrange(3, 49152) for _ in range(1000))
            stream = deployment.generate(call(f"r{i}", prompt, 50, "disaggregated"))
            task = asyncio.create_task(stream)
            await asyncio.sleep(rng.random() * 0.4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for i in range(0, 100, 4):
            await asyncio.gather(*(leave(i + j) for j in range(4)))
        probe = await asyncio.wait_for(
            deployment.generate(call("probe", tuple(range(5, 90)), 5, "disaggregated")), 5
        )
        assert len(probe.tokens) == 5
        await deployment.until_clean()
