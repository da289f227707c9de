"""One worker process: model, pages, scheduler, transport and engine, put together and served.

Plain: no Ray here. A Serve replica, a subprocess or a test holds a ``WorkerProcess`` on its event
loop.
"""

import asyncio
import os
import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvtransfer.collective import CollectiveTransport
from kvtransfer.control import add_pages_service
from kvtransfer.faults import PageFaults, read_faults
from kvtransfer.leases import Leases
from serving.certificates import read_cluster_tls
from serving.channel.worker import Identity, WorkerServer
from serving.config import Config, Role
from workers.calibrate import Bounds, known_latency
from workers.core.latency import LatencyModel
from workers.core.pages import PagePool
from workers.core.policy import Limits
from workers.core.scheduler import Scheduler
from workers.engine import Engine, Executor, Source
from workers.faults import FaultyExecutor, FaultyScheduler, StepFaults
from workers.gguf import cache_dir
from workers.runner import ModelRunner, device_name, load_runner
from workers.threads import OnOneThread

STEP_BUDGET = {"cpu": 64, "cuda": 2048}  # tokens, of the policies that have no budget of their own
ONLINE_CEILING = 2048  # tokens; below it, the promised gaps decide
POLL_S = 0.05


class WorkerProcess:
    """``start``, then it serves until ``stop``. ``drain`` in between lets it finish."""

    def __init__(
        self,
        config: Config,
        worker_id: str,
        role: Role,
        host: str = "127.0.0.1",
        token: str = "",
    ) -> None:
        self.config, self.worker_id, self.role, self.host = config, worker_id, role, host
        self.incarnation = uuid.uuid4().hex
        self.address = ""
        self._threads = config.threads or default_threads(config.num_workers)
        self._token, self._tls = token, read_cluster_tls(config.cluster_tls)
        self._server = WorkerServer(debug=config.debug, token=token, tls=self._tls)

    async def start(self, folder: Path) -> None:
        """Load the model in ``folder`` and listen. ModelError when it cannot be served."""
        runner, latency = await asyncio.to_thread(load, self.config, folder, self._threads)
        self.address = await self._server.bind(self.host)
        self._engine = self._assemble(runner, latency)
        self._engine.start()
        await self._server.start(self._engine, self._identity(runner))

    async def drain(self, timeout_s: float) -> None:
        """Ask the gateways to move their streams, and wait until nothing runs here and nobody has
        yet to fetch pages from here."""
        self._server.leave()
        deadline = time.monotonic() + timeout_s
        while self._is_busy and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """What still runs is cut; gateways see a lost worker and go elsewhere."""
        await self._server.stop()
        await asyncio.to_thread(self._engine.stop)

    @property
    def is_healthy(self) -> bool:
        return self._engine.is_healthy

    @property
    def _is_busy(self) -> bool:
        return self._server.num_requests > 0 or self._engine.load().leased_pages > 0

    def _limits(self, device_type: str) -> Limits:
        config = self.config
        limits = Limits(max_seqs=config.max_num_seqs, policy=config.policy)
        if config.max_num_batched_tokens is not None:
            return replace(limits, max_tokens=config.max_num_batched_tokens)
        if limits.by_deadline:
            return replace(limits, max_tokens=ONLINE_CEILING, online=True)
        return replace(limits, max_tokens=STEP_BUDGET[device_type])

    def _assemble(self, runner: ModelRunner, latency: LatencyModel) -> Engine:
        config, cache = self.config, runner.cache
        device = cache.pool.device
        leases = Leases(config.lease_s)
        transport = CollectiveTransport(
            cache.pool,
            cache.layout,
            leases,
            host=self.host,
            incarnation=self.incarnation,
            device=device,
            timeout_s=config.transfer_timeout_s,
            faults=read_faults(PageFaults, config.page_faults) if config.page_faults else None,
            token=self._token,
            tls=self._tls,
        )
        add_pages_service(self._server.server, transport.endpoint)
        executor: Executor = OnOneThread(runner, self._threads)
        faults = read_faults(StepFaults, config.step_faults)
        if config.step_faults:
            executor = FaultyExecutor(executor, faults)
        make = partial(FaultyScheduler, faults=faults) if faults.preempt_every else Scheduler
        return Engine(
            executor,
            make(
                self._limits(device.type),
                PagePool(cache.num_pages, cache.layout.page_size),
                model=cache.layout.model,
                prefix_caching=config.prefix_caching,
                latency=latency,
            ),
            leases,
            transport,
            Source(self.address, self.incarnation, cache.layout),
            emit=self._server.emit,
            transfer_timeout_s=config.transfer_timeout_s,
        )

    def _identity(self, runner: ModelRunner) -> Identity:
        longest = runner.config.max_model_len
        return Identity(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            max_model_len=min(self.config.max_model_len or longest, longest),
            num_pages=runner.cache.num_pages,
            page_size=runner.cache.layout.page_size,
            vocab_size=runner.config.vocab_size,
        )


def load(config: Config, folder: Path, threads: int) -> tuple[ModelRunner, LatencyModel]:
    """The model, and what is known of its step times. ModelError when it cannot be served."""
    runner = load_runner(
        folder,
        dtype=config.dtype,
        device=config.device,
        page_size=config.page_size,
        num_pages=config.num_pages,
        threads=threads,
        max_model_len=config.max_model_len,
        max_tokens=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
    )
    layout, device = runner.cache.layout, runner.cache.pool.device
    key = f"{layout} {runner.attention.name} {device_name(device)} {threads} threads"
    bounds = Bounds(
        runner.cache.num_pages,
        layout.page_size,
        max_context=runner.config.max_model_len - 1,
        max_decodes=config.max_num_seqs,
        vocab_size=runner.vocab_size,
    )
    return runner, known_latency(runner, bounds, cache_dir() / "latency", key)


def default_threads(num_workers: int) -> int:
    """The cores, shared evenly by the workers that a machine without GPUs runs."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)
