"""The operator's procedure for choosing a step budget, from first principles, on this machine.

Measures steps of each candidate budget, takes the largest that fits the promised gap, then checks
it with real schedules of streams and a long prompt. No server and no Ray: the runner and the
scheduler.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.config import Config
from serving.deployments.worker import ONLINE_CEILING, default_threads, load
from serving.service import ServiceError
from workers.calibrate import Bounds, plan_of
from workers.core.budget import room_for
from workers.core.latency import LatencyModel
from workers.core.pages import PagePool
from workers.core.plan import BatchShape
from workers.core.policy import Limits
from workers.core.request import SLO, Request, Sampling
from workers.core.request import Sequence as Stream
from workers.core.scheduler import Scheduler
from workers.models.config import ModelError
from workers.runner import ModelRunner
from workers.weights import resolve

BUDGETS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXT = 500  # of each stream
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """A full step of one candidate budget, half-way through the long prompt."""

    budget: int
    step_s: float
    predicted_s: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Check:
    """A real schedule under one budget."""

    budget: int | None  # None: the online one
    p50_gap_s: float
    p99_gap_s: float
    kept: float  # part of the gaps within the promise
    ttft_s: float  # of the long prompt


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found out."""

    itl_s: float
    alone_s: float  # a step of the streams only
    steps: tuple[Step, ...]
    best: int | None  # the largest budget that fits
    online_tokens: int  # what the online budget gives the same step
    checks: tuple[Check, ...]


def tuning_of(
    config: Config, num_streams: int, prompt_tokens: int, say: Callable[[str], None]
) -> Tuning:
    """``say`` is told what goes on. ServiceError when the model cannot be run."""
    try:
        say("loading the model")
        tuner = Tuner(config, resolve(config.model), num_streams, prompt_tokens)
    except ModelError as error:
        raise ServiceError(str(error)) from None
    return tuner.run(say)


class Tuner:
    def __init__(self, config: Config, folder: Path, num_streams: int, prompt_tokens: int) -> None:
        self._config, self._num_streams = config, num_streams
        threads = config.threads or default_threads(1)
        self._runner, self._latency = load(config, folder, threads)
        longest = self._runner.config.max_model_len - 64
        self.prompt_tokens = min(prompt_tokens, longest)
        self._rng = random.Random(0)

    def run(self, say: Callable[[str], None]) -> Tuning:
        itl_s, decodes = self._config.slo.itl_s, [CONTEXT] * self._num_streams
        alone_s = self._measure(decodes, 0)
        steps = []
        for budget in BUDGETS:
            say(f"measuring steps of {budget} tokens")
            step_s = self._measure(decodes, max(1, budget - self._num_streams))
            predicted_s = self._latency.step_s(self._shape(budget))
            steps.append(Step(budget, step_s, predicted_s, step_s <= itl_s))
            if step_s > 2 * itl_s:
                break
        best = max((step.budget for step in steps if step.fits), default=None)
        checks = []
        for candidate in dict.fromkeys((best, None)):
            say(f"checking {f'budget {candidate}' if candidate else 'the online budget'}")
            checks.append(self._check(candidate, itl_s))
        online = room_for(self._latency, self._shape(0), itl_s)
        tokens = online.longest(self.prompt_tokens // 2, ONLINE_CEILING)
        return Tuning(itl_s, alone_s, tuple(steps), best, tokens, tuple(checks))

    def _shape(self, budget: int) -> BatchShape:
        tokens, start = max(0, budget - self._num_streams), self.prompt_tokens // 2
        context = self._num_streams * CONTEXT
        return BatchShape(tokens, tokens * (start + tokens), self._num_streams, context)

    def _measure(self, decodes: Sequence[int], chunk: int) -> float:
        """The median duration of such a step."""
        runner = self._runner
        bounds = Bounds(
            runner.cache.num_pages,
            runner.cache.layout.page_size,
            max_context=runner.config.max_model_len - 1,
            vocab_size=runner.vocab_size,
        )
        chunks = [(self.prompt_tokens // 2, chunk)] if chunk else []
        times = []
        for _ in range(REPEATS):
            plan = plan_of(self._rng, bounds, list(decodes), chunks)
            start = time.perf_counter()
            runner.run(plan.chunks)
            times.append(time.perf_counter() - start)
            for cut in plan.chunks:
                runner.forget(cut.seq.id)
        return statistics.median(times)

    def _check(self, budget: int | None, itl_s: float) -> Check:
        """Streams, and a long prompt among them, until it has its first token."""
        limits = Limits(budget or ONLINE_CEILING, online=budget is None)
        pool = PagePool(self._runner.cache.num_pages, self._runner.cache.layout.page_size)
        scheduler = Scheduler(limits, pool, prefix_caching=False, latency=self._latency)
        drive = _Drive(scheduler, self._runner, self._latency)
        for i in range(self._num_streams):
            drive.submit(f"stream-{i}", self._prompt(32), itl_s)
        while len(scheduler.decodes) < self._num_streams:
            drive.step()
        for _ in range(5):
            drive.step()
        start = time.perf_counter()
        drive.submit("long", self._prompt(self.prompt_tokens), itl_s)
        gaps = []
        while not drive.has_token("long"):
            gaps.append(drive.step())
        ttft_s = time.perf_counter() - start
        drive.end()
        ranked = sorted(gaps)
        kept = sum(gap <= itl_s for gap in gaps) / len(gaps)
        p99 = ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))]
        return Check(budget, statistics.median(gaps), p99, kept, ttft_s)

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(self._runner.vocab_size), k=num_tokens))


class _Drive:
    """Plan, run and commit, as the engine does, and nothing else."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, latency: LatencyModel) -> None:
        self._scheduler, self._runner, self._latency = scheduler, runner, latency
        self._streams: dict[str, Stream] = {}

    def submit(self, name: str, prompt: tuple[int, ...], itl_s: float) -> None:
        sampling = Sampling(max_tokens=1 << 16, temperature=0.0)
        request = Request(name, prompt, sampling, SLO(2.0, itl_s), time.perf_counter())
        self._streams[name] = Stream(request)
        self._scheduler.submit(self._streams[name])

    def has_token(self, name: str) -> bool:
        return bool(self._streams[name].output)

    def step(self) -> float:
        """Seconds that it took."""
        start = time.perf_counter()
        plan = self._scheduler.plan(start)
        shape = plan.shape
        tokens = self._runner.run(plan.chunks)
        self._scheduler.commit(plan, {name: token.id for name, token in tokens.items()})
        took_s = time.perf_counter() - start
        self._latency.observe(shape, took_s)
        return took_s

    def end(self) -> None:
        for name in self._streams:
            self._scheduler.abort(name)
            self._runner.forget(name)
