"""A second gateway of a deployment, in a process of its own, to be killed there."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from serving.channel.gateway import ChannelPools
from serving.gateway import Gateway
from serving.pools import Submission
from serving.tokenizer import Tokenizer
from tests.processes import call
from workers.core.request import Request, Sampling

NUM_STREAMS = 4
PROMPT = tuple(range(900, 1100))
STRANDED = "stranded"  # handed off by "p", and nobody has said yet where it goes on


async def _stream(gateway: Gateway, number: int, running: asyncio.Barrier) -> None:
    mode = ("mixed", "disaggregated")[number % 2]
    prompt = PROMPT[number:]
    async with aclosing(gateway.generate(call(f"other-{number}", prompt, 5000, mode))) as deltas:
        await anext(deltas)
        await anext(deltas)
        await running.wait()
        async for _ in deltas:
            pass


async def _serve(pipe: Connection, folder: Path, addresses: Mapping[str, str]) -> None:
    pools = ChannelPools()
    pools.update(addresses)
    while len(pools.workers()) < len(addresses):
        await asyncio.sleep(0.01)
    request = Request(STRANDED, PROMPT, Sampling(max_tokens=9, temperature=0.0))
    async for _ in pools.submit("p", Submission(request, hand_off=True)):
        pass
    gateway = Gateway(pools, Tokenizer.load(folder), model="t0")
    running = asyncio.Barrier(NUM_STREAMS + 1)
    streams = [asyncio.create_task(_stream(gateway, i, running)) for i in range(NUM_STREAMS)]
    await running.wait()
    pipe.send("it runs")
    await asyncio.gather(*streams)


def _run(pipe: Connection, folder: Path, addresses: Mapping[str, str]) -> None:
    asyncio.run(_serve(pipe, folder, addresses))


@asynccontextmanager
async def other_gateway(
    folder: Path, addresses: Mapping[str, str]
) -> AsyncIterator[multiprocessing.process.BaseProcess]:
    """Its process, once all its streams run and it holds a lease."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, folder, addresses), daemon=True)
    process.start()
    try:
        assert await asyncio.to_thread(ours.poll, 30), "the other gateway does not come up"
        ours.recv()
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.join, 10)
