"""Two gateways in front of the same workers, and the death of one of them."""

import asyncio
from pathlib import Path

import pytest

from tests.other_gateway import NUM_STREAMS, STRANDED, other_gateway
from tests.processes import call, deployed

pytestmark = pytest.mark.cluster

LEASE_S = 2.0
PROMPTS = [tuple(range(300 + i, 600)) for i in range(4)]
MODES = ("mixed", "disaggregated")


async def test_the_death_of_one_gateway_is_nothing_to_the_other(t0_with_tokenizer: Path) -> None:
    """Its streams end on the workers, its leases expire, and nobody else's stream notices."""
    roles = {"p": "prefill", "d": "decode"}
    async with deployed(t0_with_tokenizer, roles, lease_s=LEASE_S) as deployment:  # type: ignore[arg-type]

        async def answers(name: str) -> list[list[int]]:
            calls = (
                call(f"{name}-{i}", prompt, 400, MODES[i % 2]) for i, prompt in enumerate(PROMPTS)
            )
            done = await asyncio.gather(*(deployment.generate(c) for c in calls))
            assert all(a.final and a.final.trace.fallback == "" for a in done)
            return [a.tokens for a in done]

        undisturbed = await answers("alone")
        addresses = {name: worker.address for name, worker in deployment.workers.items()}
        async with other_gateway(t0_with_tokenizer, addresses) as process:
            running = asyncio.create_task(answers("beside"))
            while sum(v.load.running_seqs for v in deployment.pools.workers()) <= NUM_STREAMS:
                await asyncio.sleep(0.01)
            process.kill()
            assert STRANDED in (await deployment.pools.ledger("p")).leased
            assert await running == undisturbed
        await deployment.until_clean(2 * LEASE_S)
        assert all(worker._server.num_requests == 0 for worker in deployment.workers.values())
        assert await answers("after") == undisturbed
        await deployment.until_clean()
