"""How long a step or a transfer takes, learned from those that really ran.

    step_s = drift * (c0 + c1 p + c2 q + c3 n + c4 k + c5 max(0, p + n - 16))

p prefill tokens, q = sum of chunk * context, n decodes, k = sum of decode contexts. The last term
is where reading the weights stops to hide the arithmetic (DESIGN section 4 has the others).

Two time scales. The coefficients are fitted by least squares over the last few hundred steps;
steps with and without prompts are forgotten apart, so an hour of decodes does not erase what
prompts cost. ``drift`` is one factor on top that follows within a few steps when the whole machine
turns slower.

The model knows shapes and seconds. It refuses to know clocks: whoever ran the step measured it.
"""

from collections.abc import Mapping, Sequence
from math import exp, log, sqrt

from workers.core.plan import BatchShape
from workers.core.regression import Memory, solve

KNEE = 16  # tokens of a step; below, reading the weights dominates
# What a large step holds of each feature: the size at which a coefficient begins to matter.
TYPICAL = (1.0, 512.0, 512.0 * 2048, 32.0, 32.0 * 1024, 512.0)
GUESS = (0.02, 1e-3, 4e-7, 5e-4, 1e-6, 5e-4)  # seconds; a slow CPU, so that chunks start small
TICK_S = 1e-7  # nothing takes less
MEMORY = 200.0  # steps of each kind
SOLVE_EVERY = 8  # steps
PRIOR_WEIGHT = 0.1  # of a coefficient that is off by its own size, in samples that are off by 100 %
GUESS_WEIGHT = 1e-4  # the same for a prior that nobody measured
COLD_STEPS = 2  # the first of a process warm caches and allocators
DRIFT_GAIN = 0.15
SPREAD_GAIN = 0.05
ERROR_GAIN = 0.02
MIN_SPREAD, MAX_SPREAD = 0.02, 0.7
OUTLIER = 4.0  # spreads; further off than this a step says nothing of the coefficients
MIN_OUTLIER = 0.25
TAIL_GAIN = 0.5
MIN_TAIL, MAX_TAIL, FIRST_TAIL = 1.5, 8.0, 2.6
CONFIDENCE = 0.995  # that a step takes at most ``upper_s``


def features(shape: BatchShape) -> tuple[float, ...]:
    """What step time is linear in; the one place to extend."""
    p, q, n, k = (
        shape.prefill_tokens,
        shape.prefill_context,
        shape.decode_seqs,
        shape.decode_context,
    )
    return (1.0, p, q, n, k, max(0, p + n - KNEE))


def step_seconds(c: tuple[float, ...], shape: BatchShape) -> float:
    """The expected duration of a step with these coefficients."""
    x = features(shape)
    return c[0] + c[1] * x[1] + c[2] * x[2] + c[3] * x[3] + c[4] * x[4] + c[5] * x[5] + TICK_S


def prompt_seconds(c: tuple[float, ...], start: int, stop: int) -> float:
    """What computing tokens [start, stop) of a prompt adds to the steps that they ride in."""
    length = stop - start
    return (c[1] + c[5]) * length + c[2] * length * (start + stop) / 2


class _Kind:
    """What is remembered of the steps with prompts, or of those without."""

    def __init__(self, spread: float) -> None:
        self.memory = Memory(len(GUESS), MEMORY)
        self.variance = spread * spread  # of the log of observed / predicted
        self.tail = FIRST_TAIL  # spreads; CONFIDENCE of the steps stay below

    @property
    def spread(self) -> float:
        return min(MAX_SPREAD, max(MIN_SPREAD, sqrt(self.variance)))

    def judge(self, off: float) -> bool:
        """Count a step that took exp(off) times its prediction; whether it was an outlier.

        An outlier widens the spread up to its own limit, so what keeps coming is one no longer.
        The tail takes a step up for each miss and a small one down for each hit, and comes to
        rest where misses are as rare as they should be, whatever the distribution.
        """
        spread = self.spread
        missed = off > self.tail * spread
        self.tail += TAIL_GAIN * (CONFIDENCE if missed else CONFIDENCE - 1.0)
        self.tail = min(MAX_TAIL, max(MIN_TAIL, self.tail))
        limit = max(MIN_OUTLIER, OUTLIER * spread)
        clipped = min(abs(off), limit)
        self.variance += SPREAD_GAIN * (clipped * clipped - self.variance)
        return abs(off) > limit


class LatencyModel:
    """Step times and transfer times of one worker. Not thread-safe."""

    def __init__(self, coefficients: tuple[float, ...] | None = None, spread: float = 0.1) -> None:
        self.coefficients = coefficients or GUESS
        self.error = 0.0  # of recent predictions: mean of |predicted / observed - 1|
        self.ratio = 1.0  # of recent predictions: predicted / observed
        self.num_steps = 0
        self._prior_weight = PRIOR_WEIGHT if coefficients else GUESS_WEIGHT
        self._prior = self.coefficients
        self._drift = 1.0
        self._prompts, self._decodes = _Kind(spread), _Kind(spread)
        self._links: dict[str, _Link] = {}
        self._any_link = _Link()

    # ------------------------------------------------------------------ predicting

    def step_s(self, shape: BatchShape) -> float:
        """The expected duration."""
        return self._drift * step_seconds(self.coefficients, shape)

    def margin(self, with_prompts: bool) -> float:
        """The factor on ``step_s`` that CONFIDENCE of the steps of this kind stay below."""
        kind = self._prompts if with_prompts else self._decodes
        return exp(min(1.0, kind.tail * kind.spread))

    def upper_s(self, shape: BatchShape) -> float:
        """CONFIDENCE of the steps of this shape take no longer."""
        return self.step_s(shape) * self.margin(shape.prefill_tokens > 0)

    def prompt_s(self, start: int, stop: int) -> float:
        """What computing tokens [start, stop) of a prompt adds to the steps that they ride in."""
        return self._drift * prompt_seconds(self.coefficients, start, stop)

    def transfer_s(self, num_bytes: int, pair: str = "") -> float:
        """The expected duration of moving so many bytes from the worker named ``pair``; as from
        the others when nothing came from there yet."""
        return (self._links.get(pair) or self._any_link).seconds(num_bytes)

    def link(self) -> tuple[float, float]:
        """Seconds of moving pages here, fixed and per byte, over all that they came from."""
        return self._any_link.coefficients

    def current(self) -> tuple[float, ...]:
        """The coefficients as they hold now."""
        return tuple(self._drift * c for c in self.coefficients)

    @property
    def spread(self) -> float:
        """Of the log of observed / predicted, over steps with prompts."""
        return self._prompts.spread

    @property
    def is_measured(self) -> bool:
        """Whether the coefficients come from steps, here or at the calibration."""
        return self._prior_weight == PRIOR_WEIGHT or self.num_steps > COLD_STEPS + SOLVE_EVERY

    # ------------------------------------------------------------------ learning

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """A step of this shape took so long."""
        self.num_steps += 1
        if self.num_steps <= COLD_STEPS or not (shape.prefill_tokens or shape.decode_seqs):
            return
        seconds = max(seconds, TICK_S)
        ratio = self.step_s(shape) / seconds
        off = -log(ratio)
        self.error += ERROR_GAIN * (min(1.0, abs(ratio - 1.0)) - self.error)
        self.ratio += ERROR_GAIN * (min(2.0, ratio) - self.ratio)
        kind = self._prompts if shape.prefill_tokens else self._decodes
        if kind.judge(off):
            return
        self._learn(kind, features(shape), seconds, off)

    def _learn(self, kind: _Kind, x: tuple[float, ...], seconds: float, off: float) -> None:
        self._drift *= exp(DRIFT_GAIN * off)
        kind.memory.add(x, seconds / self._drift)
        if kind.memory.num_samples % SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        scale = _scale(self.coefficients[0], self._prior)
        memories = (self._prompts.memory, self._decodes.memory)
        self.coefficients = solve(memories, self._prior, scale, self._prior_weight)

    def observe_transfer(self, num_bytes: int, seconds: float, pair: str) -> None:
        """Moving so many bytes from the worker named ``pair`` took so long."""
        self._links.setdefault(pair, _Link()).observe(num_bytes, seconds)
        self._any_link.observe(num_bytes, seconds)

    # ------------------------------------------------------------------ keeping

    def settle(self) -> None:
        """What was learned so far becomes what is fallen back on."""
        self._solve()
        self._prior = self.coefficients = self.current()
        self._drift, self._prior_weight = 1.0, PRIOR_WEIGHT

    def snapshot(self) -> dict[str, object]:
        """For a file, and back by ``restored``."""
        return {
            "coefficients": list(self.current()),
            "spread": self.spread,
        }


def _scale(fixed_s: float, prior: tuple[float, ...]) -> list[float]:
    """By how much each coefficient may be off."""
    size = fixed_s + sum(c * x for c, x in zip(prior[1:], TYPICAL[1:], strict=True))
    return [max(c, 0.05 * size / x, 1e-12) for c, x in zip(prior, TYPICAL, strict=True)]


def fitted(samples: Sequence[tuple[BatchShape, float]]) -> LatencyModel:
    """What steps of these shapes and seconds suggest, all of them together. A model that learns
    one by one takes how far off its first guess was for noise, and is cautious for long: a guess
    for a CPU is a hundred times off on a GPU."""
    memory = Memory(len(GUESS), MEMORY)
    for shape, seconds in samples[COLD_STEPS:]:
        memory.add(features(shape), max(seconds, TICK_S))
    model = LatencyModel(solve([memory], GUESS, _scale(GUESS[0], GUESS), GUESS_WEIGHT))
    for shape, seconds in samples:
        model.observe(shape, seconds)
    model.settle()
    return model


def restored(snapshot: object) -> LatencyModel:
    """The model of a snapshot. ValueError when it is not one of this form."""
    if not isinstance(snapshot, Mapping):
        raise ValueError("not the coefficients of a latency model")
    values, spread = snapshot.get("coefficients"), snapshot.get("spread")
    if not isinstance(values, list) or len(values) != len(GUESS):
        raise ValueError("not the coefficients of a latency model")
    coefficients = tuple(float(value) for value in values)
    if not isinstance(spread, float) or min(coefficients) < 0 or max(coefficients) <= 0:
        raise ValueError("not the coefficients of a latency model")
    return LatencyModel(coefficients, spread)


class _Link:
    """Transfers from one worker: a fixed part and a rate."""

    TYPICAL_BYTES = float(16 << 20)
    MEMORY = 50.0

    def __init__(self) -> None:
        self._memory = Memory(2, self.MEMORY)
        self._prior = (1e-3, 1e-10)  # fast: who never tries never learns
        self.coefficients = self._prior

    def seconds(self, num_bytes: int) -> float:
        fixed, per_byte = self.coefficients
        return fixed + per_byte * num_bytes

    def observe(self, num_bytes: int, seconds: float) -> None:
        self._memory.add((1.0, float(num_bytes)), max(seconds, TICK_S))
        found = solve([self._memory], self._prior, self._prior, GUESS_WEIGHT)
        self.coefficients = (found[0], found[1])
