"""What breaks, and when: one disaggregated request per cell, on real worker processes.

    python -m bench.faults          # live, one seed
    python -m bench.faults --sim    # the same matrix in virtual time, ten seeds, in a minute

A prefill, a decode and a spare worker of a tiny model, each a process, without Ray. In each
cell one thing goes wrong at one phase of one request; the answer must be that of an undisturbed
run, or aborted, and every page must come home. Faults of messages strike the next message about
the request between the gateway and a worker; while pages are on their way, those. Prints a row per
cell and writes ``bench/results/faults.jsonl`` or ``faults-sim.jsonl``.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.calls import Answer, ask
from bench.processes import SMALL, Cluster
from bench.report import save
from bench.sim import matrix
from bench.sim.matrix import FAULTS, PHASES
from bench.tiny import tiny_model
from bench.workloads import prompt_of
from serving.config import Role
from serving.errors import Aborted
from serving.messages import requests_of
from serving.pools import WorkerLost
from serving.redis_store import RedisStore
from serving.state import MemoryStore

ROLES: dict[str, Role] = {"p": "prefill", "d": "decode", "spare": "mixed"}
PROMPT, PLUG, MAX_TOKENS = prompt_of(320, 7), prompt_of(640, 8), 16
CELL_S = 60.0
GAP_S = 1.0
SLOW_S = 0.05  # more for each step, so that phases last
SLOW_PAGES = "delay=1 delay_s=0.4"
SLOW = replace(SMALL, page_faults=SLOW_PAGES, step_faults=f"slow_s={SLOW_S}")
IN_PAGES = {
    "drop": "drop=1",
    "duplicate": "duplicate=1",
    "delay": "delay=1 delay_s=0.9",
    "corrupt": "flip=1",
}
NOWHERE = "redis://127.0.0.1:9"  # the discard port: nobody answers


@dataclass(slots=True)
class Cell:
    """One request, and what is done to it once it is in its phase."""

    cluster: Cluster
    fault: str
    phase: str
    expected: list[int]
    answer: Answer = field(default_factory=Answer)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    is_done: bool = False

    @property
    def id(self) -> str:
        return f"{self.fault} at {self.phase}".replace(" ", "-").replace(",", "")

    async def play(self) -> str:
        """What became of it, in a few words that begin with ok or WRONG."""
        cluster = self.cluster
        faulty = self.phase == "transferring" and self.fault in IN_PAGES
        pages = IN_PAGES[self.fault] if faulty else SLOW_PAGES
        await cluster.mend(p=replace(SLOW, page_faults=pages))
        if self.fault == "state store down":
            cluster.new_gateway(RedisStore(NOWHERE))
        plug = None
        if self.phase == "queued":
            wait = ask(cluster.gateway, f"plug-{self.id}", PLUG, 1, "mixed", ("p",))
            plug = asyncio.create_task(wait)
            await asyncio.sleep(0.1)
        cluster.watch = self._watch
        trouble = asyncio.create_task(self._trouble())
        started = time.monotonic()
        outcome = await self._outcome()
        took_s = time.monotonic() - started
        cluster.watch = lambda message: None
        trouble.cancel()
        await asyncio.gather(trouble, *([plug] if plug else []), return_exceptions=True)
        if not self.is_done:
            outcome = f"WRONG: it never was {self.phase}"
        if cluster.meddler.disarm():
            outcome += ", nothing was left to strike"
        try:
            await cluster.until_clean()
        except TimeoutError:
            outcome = f"WRONG: pages leaked after it was {outcome}"
        if self.fault == "state store down":
            cluster.new_gateway(MemoryStore())
        return f"{outcome} ({took_s:.1f} s)"

    async def _outcome(self) -> str:
        try:
            async with asyncio.timeout(CELL_S):
                pinned = ("p", "d")
                how = (PROMPT, MAX_TOKENS, "disaggregated", pinned, self.answer)
                await ask(self.cluster.gateway, self.id, *how)
        except Aborted:
            return "ok, aborted" if self.fault == "abort" else "WRONG: aborted"
        except Exception as error:  # whatever it is, it is the cell's outcome
            return f"WRONG: {type(error).__name__}: {error}"
        if self.answer.tokens != self.expected:
            return f"WRONG tokens, {len(self.answer.tokens)} of {MAX_TOKENS}"
        if self.fault == "abort":
            return "ok, over before"
        return "ok, computed again" if self.answer.trace.fallback else "ok"

    # ------------------------------------------------------------------ the phase

    def _watch(self, message: Any) -> None:
        """Between the ends of the wire; what has to happen right here does."""
        if not any(name.split("~")[0] == self.id for name in requests_of(message)):
            return
        is_submit = hasattr(message, "submit") and message.submit.request_id != ""
        outputs = [] if hasattr(message, "submit") else list(message.report.outputs)
        match self.phase:
            case "queued" | "prefill chunk 1":
                is_here = is_submit
            case "mid-prefill":
                is_here = any(output.HasField("promise") for output in outputs)
            case "prefilled, not pulled":
                is_here = any(output.HasField("handle") for output in outputs)
                if is_here and self.fault in ("kill prefill", "stop prefill", "gateway gap"):
                    self._act()  # before the decode worker hears of it
            case "transferring" | "pulled, before first decode step":
                is_here = is_submit and message.submit.HasField("handle")
                is_here = is_here and not message.submit.early
            case _:
                is_here = False
        if is_here:
            self.reached.set()

    async def _trouble(self) -> None:
        match self.phase:
            case "decoding" | "last token" | "draining":
                wanted = MAX_TOKENS - 1 if self.phase == "last token" else 6
                while len(self.answer.tokens) < wanted:
                    await asyncio.sleep(0.002)
            case _:
                await self.reached.wait()
        match self.phase:
            case "prefill chunk 1":
                await asyncio.sleep(SLOW_S / 2)
            case "mid-prefill":
                await asyncio.sleep(2 * SLOW_S)
            case "transferring":
                await asyncio.sleep(0.02)
            case "pulled, before first decode step":
                with contextlib.suppress(WorkerLost):
                    while (await self.cluster.pools.ledger("p")).leased:
                        await asyncio.sleep(0.005)
            case "draining":
                self.cluster.pools.drain("d")
        self._act()

    # ------------------------------------------------------------------ the fault

    def _act(self) -> None:
        if self.is_done:
            return
        self.is_done = True
        cluster = self.cluster
        match self.fault.split():
            case ["kill", role]:
                cluster.signal(role[0], signal.SIGKILL)
            case ["stop", role]:
                cluster.signal(role[0], signal.SIGSTOP)
                loop = asyncio.get_running_loop()
                loop.call_later(2 * SMALL.stall_timeout_s, cluster.signal, role[0], signal.SIGCONT)
            case ["abort"]:
                cluster.gateway.abort(self.id)
            case ["gateway", "gap"]:
                time.sleep(GAP_S)  # the whole process, as a long garbage collection would
            case ["drain"]:
                cluster.pools.drain("d" if self.answer.tokens else "p")
            case [kind] if self.phase != "transferring":
                cluster.meddler.arm(kind, self.id)


Row = dict[str, object]


async def live(faults: list[str], phases: list[str]) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(tiny_model(Path(folder), tokenizer=True), ROLES, SLOW)
        try:
            await cluster.mend()
            alone = await ask(cluster.gateway, "alone", PROMPT, MAX_TOKENS, "mixed", ("spare",))
            for phase in phases:
                for fault in faults:
                    outcome = await Cell(cluster, fault, phase, alone.tokens).play()
                    rows.append({"fault": fault, "phase": phase, "outcome": outcome})
                    print(fault, phase, outcome, sep=" | ", flush=True)
        finally:
            await cluster.close()
    return rows


def simulated(faults: list[str], phases: list[str], num_seeds: int) -> list[Row]:
    """A row per cell: how often it ended in which way, or the first seed that went wrong."""
    rows: list[Row] = []
    for fault in faults:
        for phase in phases:
            outcomes = [matrix.play(fault, phase, seed) for seed in range(num_seeds)]
            wrong = [f"seed {i}: {o}" for i, o in enumerate(outcomes) if not o.startswith("ok")]
            counts = Counter(outcome.split(" (")[0] for outcome in outcomes)
            words = "; ".join(f"{words} x {count}" for words, count in counts.most_common())
            rows.append({"fault": fault, "phase": phase, "outcome": (wrong or [words])[0]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sim", action="store_true")
    parser.add_argument("--seeds", type=int, default=10, help="of each cell, simulated")
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what is broken on purpose is told once a cell
    started = time.monotonic()
    if args.sim:
        rows = simulated(args.faults, args.phases, args.seeds)
    else:
        rows = asyncio.run(live(args.faults, args.phases))
    table = Table(title="One request per cell: same tokens, every page home")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=120).print(table)
    num_ok = sum(str(row["outcome"]).startswith("ok") for row in rows)
    took_s = time.monotonic() - started
    print(f"{num_ok} of {len(rows)} as documented, in {took_s:.0f} s")
    if len(rows) == len(FAULTS) * len(PHASES):
        seeds = args.seeds if args.sim else 1
        name = "faults-sim" if args.sim else "faults"
        save(name, rows, num_ok=num_ok, num_cells=len(rows), seeds=seeds, took_s=round(took_s))


if __name__ == "__main__":
    main()
