"""FAULTS 103: the times that we tell of a request are those that its client sees."""

import asyncio
import statistics
from typing import Any

import pytest

from bench.client import open_client, stream
from bench.report import Record
from bench.workloads import prompt_of
from tests.integration.conftest import Running

pytestmark = pytest.mark.cluster

NUM, AT_ONCE = 30, 2
PROMPT, ANSWER = 6000, 32
BEFORE = ("front_s", "queue_s", "prefill_s")  # the first token
AFTER = ("transfer_s", "decode_s")


async def play(url: str, mode: str) -> list[Record]:
    """Few at a time, so that the client is not late itself, and one waits for another."""
    turns = asyncio.Semaphore(AT_ONCE)
    async with open_client(url) as client:

        async def ask(seed: int) -> Record:
            async with turns:
                prompt = prompt_of(PROMPT, seed)
                return await stream(client, f"r{seed}", prompt, ANSWER, evenflow={"mode": mode})

        await ask(NUM)  # connections, pairs and buffers are made at first use
        return await asyncio.gather(*(ask(seed) for seed in range(NUM)))


def total(told: dict[str, Any], names: tuple[str, ...]) -> float:
    return float(sum(told[name] for name in names))


@pytest.mark.parametrize("mode", ["mixed", "disaggregated"])
async def test_parts_add_up_to_what_the_client_sees(evenflow: Running, mode: str) -> None:
    records = await play(evenflow.url, mode)
    firsts, wholes = [], []
    for record in records:
        told: dict[str, Any] = record.evenflow
        assert record.error is None and told["mode"] == mode and told["fallback"] is None
        firsts.append(told["ttft_s"] / record.ttft_s)
        e2e_s = record.token_times[-1] - record.sent_at
        wholes.append((told["ttft_s"] + total(told, AFTER)) / e2e_s)
        if mode == "mixed":  # else the queue of the second worker is among them
            assert total(told, BEFORE) == pytest.approx(told["ttft_s"], rel=0.05)
        assert min(told[name] for name in BEFORE + AFTER) >= 0
    assert statistics.median(firsts) == pytest.approx(1, abs=0.05)
    assert statistics.median(wholes) == pytest.approx(1, abs=0.05)
