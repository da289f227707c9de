"""Running streams that change their worker: T0 on real engines, pages over real pairs."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.processes import Answer, Deployment, call, deployed

pytestmark = pytest.mark.cluster

NUM_STREAMS = 8


async def continuous(deployment: Deployment, index: int, stop: asyncio.Event) -> list[Answer]:
    """The same request again and again, until it is enough."""
    prompt, answers = tuple(range(100 + index, 160 + 7 * index)), []
    while not stop.is_set():
        generation = call(f"s{index}", prompt, max_tokens=150)
        answers.append(await deployment.generate(generation))
    return answers


async def undisturbed(deployment: Deployment) -> list[list[int]]:
    stop = asyncio.Event()
    stop.set()
    tokens = []
    for index in range(NUM_STREAMS):
        prompt = tuple(range(100 + index, 160 + 7 * index))
        answer = await deployment.generate(call("alone", prompt, max_tokens=150))
        tokens.append(answer.tokens)
    return tokens


def check(expected: list[list[int]], found: list[list[Answer]]) -> None:
    for tokens, answers in zip(expected, found, strict=True):
        for answer in answers:
            assert answer.tokens == tokens
            assert answer.final is not None and answer.final.usage.completion_tokens == 150
            assert answer.final.trace.fallback == ""


async def test_flips_and_moves_under_streams_change_no_token(t0_with_tokenizer: Path) -> None:
    """Done 6: 50 role flips and 200 moves under 8 continuous streams."""
    rng, names = random.Random(3), ["a", "b", "c"]
    roles = dict.fromkeys(names, "mixed")
    async with deployed(t0_with_tokenizer, roles) as deployment:  # type: ignore[arg-type]
        expected = await undisturbed(deployment)
        stop = asyncio.Event()
        streams = [asyncio.create_task(continuous(deployment, i, stop)) for i in range(NUM_STREAMS)]
        try:
            for i in range(350):
                await asyncio.sleep(0.02)
                if i % 7 == 0:
                    role = rng.choice(["mixed", "prefill", "decode"])
                    await deployment.gateway.moves.set_role(rng.choice(names), role)
                else:
                    while not deployment.gateway.move(f"s{rng.randrange(8)}", rng.choice(names)):
                        await asyncio.sleep(0.01)
        finally:
            stop.set()
            found = await asyncio.gather(*streams)
        check(expected, found)
        moves = sum(a.final.trace.num_moves for answers in found for a in answers if a.final)
        longest = max(a.longest_gap_s for answers in found for a in answers)
        print(f"{moves} moves, longest pause {longest * 1000:.0f} ms")
        assert moves >= 200
        await deployment.until_clean()


async def test_a_drained_worker_empties_while_its_streams_go_on(t0_with_tokenizer: Path) -> None:
    """FAULTS 83: identical streams, nothing new there, and it stops at once."""
    async with deployed(t0_with_tokenizer, {"a": "mixed", "b": "mixed"}) as deployment:
        expected = await undisturbed(deployment)
        stop = asyncio.Event()
        streams = [asyncio.create_task(continuous(deployment, i, stop)) for i in range(NUM_STREAMS)]
        await asyncio.sleep(0.5)
        started = time.monotonic()
        await asyncio.wait_for(deployment.workers["a"].drain(30), 10)
        print(f"drained in {time.monotonic() - started:.2f} s")
        stop.set()
        found = await asyncio.gather(*streams)
        check(expected, found)
        assert all(answers[-1].final.trace.workers[-1] == "b" for answers in found)
        await deployment.until_clean()
