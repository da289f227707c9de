"""Worker processes with the tiny model, in this process, and a gateway on channels to them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from serving.channel.gateway import ChannelPools
from serving.config import Config, Role
from serving.deployments.worker import WorkerProcess
from serving.gateway import Gateway
from serving.generation import Final, Generation
from serving.tokenizer import Tokenizer
from workers.core.request import Sampling


@dataclass(slots=True)
class Answer:
    """What one call brought."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    final: Final | None = None

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


@dataclass(slots=True)
class Deployment:
    workers: dict[str, WorkerProcess]
    pools: ChannelPools
    gateway: Gateway

    async def generate(self, generation: Generation) -> Answer:
        answer = Answer()
        async with aclosing(self.gateway.generate(generation)) as deltas:
            async for delta in deltas:
                answer.tokens += delta.token_ids
                answer.times += [time.monotonic()] * len(delta.token_ids)
                answer.final = delta.final or answer.final
        return answer

    async def until_clean(self, timeout_s: float = 5.0) -> None:
        """FAULTS 43: no page is owned or leased anywhere."""
        async with asyncio.timeout(timeout_s):
            for name in self.workers:
                while not (await self.pools.ledger(name)).is_clean:
                    await asyncio.sleep(0.02)


def call(
    id: str, prompt: tuple[int, ...], max_tokens: int, mode: str = "auto", **more: object
) -> Generation:
    """Greedy, and it does not stop early."""
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
    return Generation(id, id, (prompt,), sampling, time.monotonic(), mode=mode, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def deployed(
    folder: Path, roles: dict[str, Role], **settings: object
) -> AsyncIterator[Deployment]:
    """Workers by name, attached. The settings are those of ``Config``."""
    config = Config(
        **{  # type: ignore[arg-type]
            "dtype": "float32",
            "num_pages": 512,
            "threads": 1,
            "debug": True,
            "mixed": len(roles),
            **settings,
        }
    )
    workers = {name: WorkerProcess(config, name, role) for name, role in roles.items()}
    pools = ChannelPools(stall_timeout_s=config.stall_timeout_s)
    try:
        await asyncio.gather(*(worker.start(folder) for worker in workers.values()))
        pools.update({name: worker.address for name, worker in workers.items()})
        async with asyncio.timeout(10):
            while len(pools.workers()) < len(workers):
                await asyncio.sleep(0.01)
        gateway = Gateway(pools, Tokenizer.load(folder), model="t0")
        yield Deployment(workers, pools, gateway)
    finally:
        await pools.close()
        await asyncio.gather(*(worker.stop() for worker in workers.values()))
