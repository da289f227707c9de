"""What breaks, and when: one disaggregated request per cell, on real worker processes.

    python -m bench.faults

A prefill, a decode and a spare worker of SmolLM2, each in its own process, without Ray. In each
cell one thing goes wrong at one phase of one request; the answer must be that of an undisturbed
run, or aborted, and every page must come home. Prints a row per fault and writes
``bench/results/faults.jsonl``.
"""

import argparse
import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from rich.console import Console
from rich.table import Table

from bench.report import save
from bench.workloads import prompt_of
from serving.channel import ChannelPools
from serving.config import Config, Role
from serving.errors import Aborted
from serving.gateway import Gateway
from serving.generation import Generation
from serving.pools import WorkerLost
from serving.tokenizer import Tokenizer
from workers.core.request import Sampling
from workers.weights import resolve

ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "spare": "mixed"}
PROMPT, MAX_TOKENS = prompt_of(400, 7), 24
PHASES = {"mid-prefill": 0, "transferring": 1, "decoding": 8, "last token": MAX_TOKENS - 1}
CELL_S = 60.0
STALL_S = 4.0
PREFILL_S = 0.3  # the prompt takes longer


def _serve(pipe: Connection, name: str, config: Config) -> None:
    from serving.deployments.worker import WorkerProcess  # torch, in this process alone

    async def run() -> None:
        worker = WorkerProcess(config, name, ROLES[name])
        await worker.start(resolve(""))
        pipe.send(worker.address)
        await asyncio.Event().wait()

    asyncio.run(run())


class Cluster:
    """Three workers and a gateway. ``mend`` replaces what a cell has broken."""

    def __init__(self) -> None:
        self.pools = ChannelPools(stall_timeout_s=STALL_S)
        self.gateway = Gateway(self.pools, Tokenizer.load(resolve("")), model="bench")
        self._processes: dict[str, BaseProcess] = {}
        self._addresses: dict[str, str] = {}
        self._faults: dict[str, str] = {}

    async def mend(self, page_faults: str = "") -> None:
        """Everybody is there, with these faults in the prefill worker's pages."""
        wanted = {name: page_faults if name == "p" else "" for name in ROLES}
        for name, faults in wanted.items():
            process = self._processes.get(name)
            if process is None or not process.is_alive() or self._faults[name] != faults:
                await asyncio.to_thread(self._start, name, faults)
        self.pools.update(self._addresses)
        async with asyncio.timeout(CELL_S):
            while {view.id for view in self.pools.workers() if not view.is_leaving} != set(ROLES):
                await asyncio.sleep(0.05)

    def _start(self, name: str, page_faults: str) -> None:
        self.kill(name)
        config = Config(
            dtype="float32",
            num_pages=256,
            threads=1,
            debug=True,
            lease_s=3.0,
            transfer_timeout_s=1.0,
            prefix_caching=False,
            page_faults=page_faults,
        )
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, name, config), daemon=True)
        process.start()
        if not ours.poll(120):
            raise SystemExit(f"worker {name} does not start")
        self._processes[name], self._addresses[name] = process, ours.recv()
        self._faults[name] = page_faults

    def signal(self, name: str, signum: signal.Signals) -> None:
        pid = self._processes[name].pid
        assert pid is not None
        os.kill(pid, signum)

    def kill(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None:
            process.kill()
            process.join()

    async def until_clean(self) -> None:
        async with asyncio.timeout(CELL_S):
            for view in self.pools.workers():
                while True:
                    try:
                        if (await self.pools.ledger(view.id)).is_clean:
                            break
                    except WorkerLost:
                        break  # its pages went with it
                    await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self.pools.close()
        for name in self._processes:
            self.kill(name)


Action = Callable[[Cluster, str], Awaitable[None]]


def _signal(name: str, signum: signal.Signals, then: signal.Signals | None = None) -> Action:
    async def act(cluster: Cluster, request_id: str) -> None:
        cluster.signal(name, signum)
        if then is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(2 * STALL_S, cluster.signal, name, then)

    return act


async def _abort(cluster: Cluster, request_id: str) -> None:
    cluster.gateway.abort(request_id)


async def _drain(cluster: Cluster, request_id: str) -> None:
    await cluster.gateway.moves.drain("d")


async def _nothing(cluster: Cluster, request_id: str) -> None:
    """The fault is in the pages."""


STOP, CONT, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL
FAULTS: dict[str, tuple[str, Action]] = {
    "kill prefill": ("", _signal("p", KILL)),
    "kill decode": ("", _signal("d", KILL)),
    "stop prefill": ("", _signal("p", STOP, CONT)),
    "stop decode": ("", _signal("d", STOP, CONT)),
    "abort": ("", _abort),
    "drain decode": ("", _drain),
    "drop": ("drop=1", _nothing),
    "delay": ("delay=1 delay_s=0.5", _nothing),
    "truncate": ("truncate=1", _nothing),
    "corrupt": ("flip=1", _nothing),
    "duplicate": ("duplicate=1", _nothing),
    "reorder": ("reorder=0.5", _nothing),
}


def _generation(id: str, mode: str, pinned: tuple[str, ...] = ()) -> Generation:
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
    prompts = (tuple(PROMPT),)
    return Generation(id, id, prompts, sampling, time.monotonic(), mode=mode, pinned=pinned)


async def _ask(
    cluster: Cluster, generation: Generation, at: int, act: Action
) -> tuple[list[int], str]:
    """The tokens, and what the answer says of a fallback. ``act`` runs after ``at`` tokens."""
    tokens: list[int] = []
    fallback, acted = "", False
    early = None
    if at == 0:
        early = asyncio.create_task(_after(PREFILL_S, act, cluster, generation.id))
    try:
        async with aclosing(cluster.gateway.generate(generation)) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                if at and len(tokens) >= at and not acted:
                    acted = True
                    await act(cluster, generation.id)
                if delta.final is not None:
                    fallback = delta.final.trace.fallback
    finally:
        if early is not None:
            await early
    return tokens, fallback


async def _after(pause_s: float, act: Action, cluster: Cluster, request_id: str) -> None:
    await asyncio.sleep(pause_s)
    await act(cluster, request_id)


async def cell(cluster: Cluster, fault: str, phase: str, expected: list[int]) -> str:
    """What became of it, in a few words that begin with ok or WRONG."""
    page_faults, act = FAULTS[fault]
    await cluster.mend(page_faults)
    generation = _generation(f"{fault}-{phase}".replace(" ", "-"), "disaggregated", ("p", "d"))
    started = time.monotonic()
    try:
        tokens, fallback = await asyncio.wait_for(
            _ask(cluster, generation, PHASES[phase], act), CELL_S
        )
        outcome = "ok" if tokens == expected else f"WRONG after {len(tokens)} tokens"
        if fallback:
            outcome += ", computed again"
    except Aborted:
        outcome = "ok, aborted" if fault == "abort" else "WRONG: aborted"
    except Exception as error:  # whatever it is, it is the cell's outcome
        outcome = f"WRONG: {type(error).__name__}: {error}"
    took_s = time.monotonic() - started
    try:
        await cluster.until_clean()
    except TimeoutError:
        outcome = "WRONG: pages leaked"
    if fault == "drain decode":
        await cluster.gateway.moves.set_role("d", "decode")
    return f"{outcome} ({took_s:.1f} s)"


async def run(faults: list[str]) -> list[dict[str, object]]:
    cluster = Cluster()
    try:
        await cluster.mend()
        expected, _ = await _ask(cluster, _generation("alone", "mixed"), MAX_TOKENS + 1, _nothing)
        rows: list[dict[str, object]] = []
        for fault in faults:
            in_pages = FAULTS[fault][1] is _nothing
            row: dict[str, object] = {"fault": fault}
            for phase in PHASES:
                skipped = in_pages and phase != "transferring"
                row[phase] = "" if skipped else await cell(cluster, fault, phase, expected)
            print(*row.values(), sep=" | ", flush=True)
            rows.append(row)
        return rows
    finally:
        await cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    args = parser.parse_args()
    rows = asyncio.run(run(args.faults))
    table = Table(title="One request per cell: same tokens, every page home")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=200).print(table)
    cells = [str(row[phase]) for row in rows for phase in PHASES if row[phase]]
    num_ok = sum(text.startswith("ok") for text in cells)
    print(f"{num_ok} of {len(cells)} as documented")
    save("faults", rows, num_ok=num_ok, num_cells=len(cells))


if __name__ == "__main__":
    main()
