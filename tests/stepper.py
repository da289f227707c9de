"""A scheduler under FAKE tokens and virtual time: each step computes its plan at once, or takes as
long as a machine of the test's choice."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.core.handle import KVHandle, KVLayout
from workers.core.latency import LatencyModel
from workers.core.pages import PagePool
from workers.core.plan import BatchShape, Chunk, StepPlan
from workers.core.policy import Limits
from workers.core.request import SLO, Request, Sampling, Sequence
from workers.core.scheduler import Scheduler

LAYOUT = KVLayout("t0", num_layers=2, num_kv_heads=2, head_dim=16, page_size=16, dtype="float32")


def request(
    name: str,
    num_prompt: int,
    max_tokens: int = 8,
    *,
    priority: int = 0,
    arrived_at: float = 0.0,
    slo: SLO | None = None,
) -> Request:
    prompt = tuple(1 + (i % 97) for i in range(num_prompt))
    sampling = Sampling(max_tokens)
    slo = slo or SLO()
    return Request(name, prompt, sampling, slo, arrived_at=arrived_at, priority=priority)


def handle(name: str, num_tokens: int) -> KVHandle:
    num_pages = -(-num_tokens // LAYOUT.page_size)
    return KVHandle(name, "p0:1", "i0", num_tokens, num_pages, LAYOUT)


@dataclass
class Stepper:
    """Plans, "computes" and commits; remembers which step gave each token."""

    limits: Limits = field(default_factory=Limits)
    num_pages: int = 64
    page_size: int = 16
    step: int = 0
    token_steps: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)  # request id -> finish reason
    handed_off: dict[str, list[int]] = field(default_factory=dict)  # request id -> its pages
    chunks: tuple[Chunk, ...] = ()  # of the last step
    prefix_caching: bool = True
    step_s: Callable[[BatchShape], float] | None = None  # the machine; None: no time passes
    latency: LatencyModel = field(default_factory=LatencyModel)
    now: float = 0.0
    token_times: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.num_pages, self.page_size)
        self.scheduler = Scheduler(
            self.limits, self.pool, prefix_caching=self.prefix_caching, latency=self.latency
        )

    def submit(self, req: Request, **kwargs: object) -> Sequence:
        seq = Sequence(req, **kwargs)  # type: ignore[arg-type]
        self.scheduler.submit(seq)
        return seq

    def run_step(self) -> tuple[StepPlan, list[str]]:
        """The plan, and the ids of the requests that got a token."""
        self.step += 1
        plan = self.scheduler.plan(self.now)
        self.chunks = plan.chunks
        self.check()
        sampled = {c.seq.id: len(c.seq.output) + 7 for c in self.chunks if c.samples}
        if self.step_s is not None and self.chunks:
            took = self.step_s(plan.shape)
            self.now += took
            self.latency.observe(plan.shape, took)
        departures = self.scheduler.commit(plan, sampled)
        for name in sampled:
            self.token_steps.setdefault(name, []).append(self.step)
            self.token_times.setdefault(name, []).append(self.now)
        for seq, reason, handed_off in departures:
            if reason:
                self.ended[seq.id] = reason
            if handed_off is not None:
                self.handed_off[seq.id] = handed_off
        return plan, list(sampled)

    def run(self, max_steps: int = 100_000) -> int:
        """Step until nothing is left; returns the number of steps."""
        start = self.step
        while len(self.scheduler):
            assert self.step - start < max_steps, "stuck"
            self.run_step()
        return self.step - start

    def check(self) -> None:
        """Invariants of every plan."""
        chunks = self.chunks
        assert len({c.seq.id for c in chunks}) == len(chunks)
        kinds = [c.is_decode for c in chunks]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        for seq, start, length in chunks:
            assert start == seq.num_computed and 0 < length <= seq.num_pending
            assert len(seq.pages) * self.page_size >= start + length

    @property
    def is_clean(self) -> bool:
        return self.pool.num_free == self.num_pages and not self.scheduler.owned()
