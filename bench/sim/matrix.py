"""Every fault at every phase of one disaggregated request, on live code in virtual time.

The documented outcome is one for all cells: the tokens of an undisturbed run, none lost and none
twice, or ``Aborted`` when the client said so; every page home soon; every worker back, and serving.
Faults of messages strike the next message about the request; while pages are on their way, those.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.calls import Answer, ask
from bench.sim.live import ROLES, LiveCluster, Timing
from bench.sim.loop import run
from bench.sim.paged import VOCAB, answer
from serving.errors import Aborted, NotFound, Unavailable
from serving.state import MemoryStore, Value
from workers.core.policy import Limits
from workers.core.request import Phase

FAULTS = (
    "kill prefill",
    "kill decode",
    "stop prefill",
    "stop decode",
    "drop",
    "duplicate",
    "delay",
    "corrupt",
    "abort",
    "gateway gap",
    "state store down",
    "drain",
)
PHASES = (
    "queued",
    "prefill chunk 1",
    "mid-prefill",
    "prefilled, not pulled",
    "transferring",
    "pulled, before first decode step",
    "decoding",
    "last token",
    "draining",
)
POLL_S = 0.0005
CELL_S = 30.0  # an answer that takes longer hangs
SOON_S = 0.5  # far less than a lease
GAP_S = 1.0  # in which the gateway hears and says nothing


class FrailStore(MemoryStore):
    """Down, it answers nobody until the breaker's deadline."""

    is_down = False

    async def set(self, key: str, value: Value, ttl_s: float) -> None:
        if self.is_down:
            await asyncio.sleep(0.05)
        else:
            await super().set(key, value, ttl_s)


@dataclass(slots=True)
class Cell:
    """One request, and what is done to it once it is in its phase."""

    fault: str
    phase: str
    cluster: LiveCluster
    store: FrailStore
    rng: random.Random
    prompt: tuple[int, ...]
    max_tokens: int
    answer: Answer = field(default_factory=Answer)
    is_reached: bool = False

    async def play(self) -> str:
        """What became of it, in words that begin with ok or WRONG."""
        cluster = self.cluster
        await cluster.ready()
        plug = None
        if self.phase == "queued":
            plug = asyncio.create_task(self._is_answered("plug", "mixed", ("p",), 10))
            await asyncio.sleep(0.03)
        trouble = asyncio.create_task(self._trouble())
        try:
            async with asyncio.timeout(CELL_S):
                await self._stream()
            outcome = self._judge()
        except Aborted:
            outcome = "ok, aborted" if self.fault == "abort" else "WRONG: aborted"
        except TimeoutError:
            outcome = f"WRONG: it hangs after {len(self.answer.tokens)} tokens"
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)
        if not self.is_reached:
            outcome = f"WRONG: it never was {self.phase}"
        if cluster.meddler.disarm() or cluster.pages.disarm():
            outcome += ", nothing was left to strike"
        if plug is not None:
            await plug
        return outcome if outcome.startswith("WRONG") else await self._aftermath(outcome)

    async def _aftermath(self, outcome: str) -> str:
        """Pages home, workers back, and the next request is served as if nothing had been."""
        cluster = self.cluster
        try:
            await self._end_drains()
            await cluster.until_clean(self._patience_s)
            await cluster.ready()
            async with asyncio.timeout(CELL_S):
                probe = await self._is_answered("probe", "disaggregated", ("p", "d"), 8)
        except TimeoutError:
            return f"WRONG: not clean or not ready again after it was {outcome}"
        try:
            await cluster.until_clean(SOON_S)
        except TimeoutError:
            return "WRONG: the next request leaves pages behind"
        return outcome if probe else "WRONG: the next request is"

    @property
    def _patience_s(self) -> float:
        """Within which pages are home: at once, unless nobody is there to let go of a lease."""
        waits_for_lease = self.fault.split()[0] in ("kill", "stop", "drop", "corrupt", "gateway")
        return self.cluster.timing.lease_s + 2 if waits_for_lease else SOON_S

    async def _end_drains(self) -> None:
        """By whoever drained it, once it is there again; a first word may be lost on the way."""
        async with asyncio.timeout(CELL_S):
            while True:
                await asyncio.sleep(0.1)  # a drain may be on its way as well
                views = {view.id: view for view in self.cluster.pools.workers()}
                if set(views) == set(ROLES) and not any(v.is_leaving for v in views.values()):
                    return
                for name in [name for name, view in views.items() if view.is_leaving]:
                    with contextlib.suppress(NotFound, Unavailable):
                        await self.cluster.gateway.moves.set_role(name, ROLES[name])

    # ------------------------------------------------------------------ the request

    async def _stream(self) -> None:
        pinned = ("p", "d")
        how = (self.prompt, self.max_tokens, "disaggregated", pinned, self.answer)
        await ask(self.cluster.gateway, "r", *how)

    async def _is_answered(self, id: str, mode: str, pinned: tuple[str, ...], num: int) -> bool:
        """A request of its own, and whether it is answered rightly."""
        prompt = [self.rng.randrange(VOCAB) for _ in range(40)]
        other = await ask(self.cluster.gateway, id, prompt, num, mode, pinned)
        return other.tokens == answer(prompt, num)

    def _judge(self) -> str:
        if self.answer.tokens != answer(self.prompt, self.max_tokens):
            return f"WRONG tokens, {len(self.answer.tokens)} of {self.max_tokens}"
        if self.answer.usage is None or self.answer.usage.completion_tokens != self.max_tokens:
            return f"WRONG usage: {self.answer.usage}"
        if self.fault == "abort":
            return "ok, over before"  # the last token was on its way
        return "ok, computed again" if self.answer.trace.fallback else "ok"

    # ------------------------------------------------------------------ the phase

    async def _trouble(self) -> None:
        reached = self._reached()
        while not reached():
            await asyncio.sleep(POLL_S)
        self.is_reached = True
        await asyncio.sleep(self.rng.choice((0.0, 0.0, 0.001, 0.003)))
        await self._act()

    def _reached(self) -> Callable[[], bool]:
        pages, num = self.cluster.pages, self.rng.randint(2, self.max_tokens - 2)
        match self.phase:
            case "queued":
                return lambda: self._is(Phase.WAITING, 0)
            case "prefill chunk 1":
                return lambda: self._is(Phase.PREFILL, 1)
            case "mid-prefill":
                return lambda: self._is(Phase.PREFILL, 65)
            case "prefilled, not pulled":
                return lambda: "r" in self.cluster.workers["p"].process.leases.held()
            case "transferring":
                return lambda: "r" in pages.carried and self._is_leased
            case "pulled, before first decode step":
                return lambda: "r" in pages.landed and self._is_leased
            case "decoding":
                return lambda: len(self.answer.tokens) >= num
            case "last token":
                return lambda: len(self.answer.tokens) >= self.max_tokens - 1
        return lambda: self._begins_to_drain(num)

    @property
    def _is_leased(self) -> bool:
        return "r" in self.cluster.workers["p"].process.leases.held()

    def _is(self, phase: Phase, num_computed: int) -> bool:
        scheduler = self.cluster.workers["p"].engine.scheduler
        if "r" not in scheduler.owned() and phase is not Phase.WAITING:
            return False
        waiting = any(seq.id == "r" for seq in scheduler.waiting())
        if phase is Phase.WAITING:
            return waiting
        return scheduler["r"].phase is phase and scheduler["r"].num_computed >= num_computed

    def _begins_to_drain(self, num: int) -> bool:
        if len(self.answer.tokens) < num:
            return False
        self._drain("d")
        return True

    # ------------------------------------------------------------------ the fault

    async def _act(self) -> None:
        cluster = self.cluster
        match self.fault.split():
            case ["kill", role]:
                cluster.kill(role[0])
            case ["stop", role]:
                cluster.freeze(role[0], 2 * cluster.timing.stall_timeout_s)
            case ["abort"]:
                cluster.gateway.abort("r")
            case ["gateway", "gap"]:
                cluster.meddler.hold(GAP_S)
            case ["state", "store", "down"]:
                self.store.is_down = True
            case ["drain"]:
                self._drain("d" if len(self.answer.tokens) > 1 else self.rng.choice("pd"))
            case [kind]:
                if self.phase == "transferring":
                    cluster.pages.arm(kind)
                else:
                    cluster.meddler.arm(kind, "r")

    def _drain(self, name: str) -> None:
        """Say it, and do not wait for its confirmation."""
        if any(view.id == name for view in self.cluster.pools.workers()):
            self.cluster.pools.drain(name)


async def _play(fault: str, phase: str, seed: int) -> str:
    rng = random.Random(f"{fault} {phase} {seed}")
    timing = Timing(
        step_s=rng.choice((0.004, 0.01, 0.03)),
        latency_s=rng.choice((0.0007, 0.002)),
        page_s=rng.choice((0.0005, 0.004)),
    )
    store = FrailStore(clock=asyncio.get_running_loop().time)
    # A queue is where one waits: the prefill worker takes one request at a time there.
    limits = {"p": Limits(64, 1)} if phase == "queued" else {}
    cluster = LiveCluster(
        timing,
        limits=limits,
        num_pages=rng.choice((48, 256)),
        prefix_caching=rng.random() < 0.7,
        early_fetch=rng.random() < 0.6,
        store=store,
    )
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(200, 500)))
    cell = Cell(fault, phase, cluster, store, rng, prompt, rng.randint(6, 30))
    try:
        outcome = await cell.play()
        return f"{outcome} ({asyncio.get_running_loop().time():.3f} s)"
    finally:
        await cluster.close()


def play(fault: str, phase: str, seed: int) -> str:
    """One cell with one seed: the same words every time."""
    return run(_play(fault, phase, seed))
