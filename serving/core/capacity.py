"""What so many workers in such roles can serve, predicted from the latency model of their steps.

    load       u = work per second / workers that share it
    decode     a step lasts c0 / (1 - u): the fixed part is paid once a step, the rest per token
    prefill    a queue in front of the workers that prefill (Sakasegawa's approximation); long
               prompts are computed beside the decodes, and wait for the shorter ones as well

Everything is put as pressure: a need over what is there, so that 1 is the most that keeps the
promises. It knows seconds of computing and promises, and neither clocks nor who the workers are.
"""

from dataclasses import dataclass, replace

from serving.core.demand import Window
from workers.core.budget import CEILING_S
from workers.core.pace import Pace

MAX_LOAD = 0.85  # of a worker's time: what arrives is not even
ITL_MARGIN = 1.25  # the promised gap over the mean step
HAND_OFF_STEPS = 3.0  # a stream that comes to a worker: asked for in one step, there in the next
MAX_PAGES = 0.9  # of the KV pages
MIN_ROOM = 0.05  # of a worker's time, when steps of decodes alone break the promise
LONG_SIGMAS = 1.64  # above the mean: one prompt in twenty is longer
LONG_WAIT = 1.5  # times its mean wait: with the length, about 3 % of first tokens are late
OWN_PART = 1.5  # a long prompt's promise is at least its own time and half of it
NO_ROOM = 100.0  # pressure on nobody at all


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A worker as the controller sees it: the coefficients of its latency model, and its pages."""

    fixed_s: float
    prompt_token_s: float
    attention_s: float  # per prompt token and token of its context
    decode_s: float
    context_s: float  # per token of a decode's context
    kv_tokens: int
    max_tokens: int = 2048  # of a step

    @classmethod
    def of(cls, pace: Pace, kv_tokens: int) -> "StepCosts":
        """From what a worker says of itself; beyond the knee each token costs a little more."""
        c0, c1, c2, c3, c4, beyond = pace.coefficients
        token_s = max(c1 + beyond, 1e-8)
        return cls(max(c0, 1e-6), token_s, c2, c3, c4, kv_tokens, pace.max_tokens)

    def prompt_s(self, num_tokens: float) -> float:
        return self.prompt_token_s * num_tokens + self.attention_s * num_tokens**2 / 2


@dataclass(frozen=True, slots=True)
class Work:
    """What a second brings, in seconds of computing."""

    prefill: float = 0.0
    decode: float = 0.0  # beyond the fixed part of each step
    tokens: float = 0.0  # sampled
    context: float = 0.0  # tokens of a stream, on average
    held: float = 0.0  # tokens whose KV is kept for streams, now
    prompt_s: float = 0.0  # of one prompt
    spread: float = 1.0  # of prompts: squared coefficient of variation
    ttft_slo_s: float = 2.0
    itl_slo_s: float = 0.1

    @property
    def is_none(self) -> bool:
        return self.prefill <= 0 and self.decode <= 0

    def at_least(self, other: "Work") -> "Work":
        """The harder of both in each respect."""
        return Work(
            max(self.prefill, other.prefill),
            max(self.decode, other.decode),
            max(self.tokens, other.tokens),
            max(self.context, other.context),
            max(self.held, other.held),
            max(self.prompt_s, other.prompt_s),
            max(self.spread, other.spread),
            min(self.ttft_slo_s, other.ttft_slo_s),
            min(self.itl_slo_s, other.itl_slo_s),
        )

    def times(self, factor: float) -> "Work":
        return replace(
            self,
            prefill=self.prefill * factor,
            decode=self.decode * factor,
            tokens=self.tokens * factor,
        )


def work_of(
    window: Window,
    costs: StepCosts,
    mean_output: float,
    cached: float,
    ttft_slo_s: float,
    itl_slo_s: float,
) -> Work:
    """The work that the arrivals of a window bring. ``cached`` is the part of prompt tokens whose
    pages are there already."""
    if not window.num_arrived:
        return Work(ttft_slo_s=ttft_slo_s or 2.0, itl_slo_s=itl_slo_s or 0.1)
    num, left = window.num_arrived, 1.0 - cached
    rate, mean = num / window.span_s, window.prompt_tokens / num
    square = window.prompt_squares / num
    prompt_s = left * (costs.prompt_token_s * mean + costs.attention_s * square / 2)
    context = mean + mean_output / 2
    tokens = rate * mean_output
    return Work(
        prefill=rate * prompt_s,
        decode=tokens * (costs.decode_s + costs.context_s * context),
        tokens=tokens,
        context=context,
        prompt_s=prompt_s,
        spread=max(0.0, square / max(mean * mean, 1.0) - 1.0),
        ttft_slo_s=ttft_slo_s or 2.0,
        itl_slo_s=itl_slo_s or 0.1,
    )


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers by role."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    @property
    def num(self) -> int:
        return self.prefill + self.decode + self.mixed

    def plus(self, role: str, num: int = 1) -> "Fleet":
        """With so many more of a role; a negative number takes away."""
        return replace(self, **{role: getattr(self, role) + num})

    def flipped(self, source: str, role: str) -> "Fleet":
        return self.plus(source, -1).plus(role)

    def __str__(self) -> str:
        roles = {"mixed": self.mixed, "prefill": self.prefill, "decode": self.decode}
        return " + ".join(f"{num} {role}" for role, num in roles.items() if num) or "no worker"


@dataclass(frozen=True, slots=True)
class Pressure:
    """Need over what is there, on the workers that prefill and on those that decode. With the
    predictions behind it."""

    prefill: float = 0.0
    decode: float = 0.0
    ttft_s: float = 0.0  # about the 97th percentile
    itl_s: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.prefill, self.decode)

    @property
    def side(self) -> str:
        return "prefill" if self.prefill >= self.decode else "decode"


def pressure(fleet: Fleet, work: Work, costs: StepCosts) -> Pressure:
    """A role is a preference: without anybody for one half, the others do both."""
    if work.is_none:
        return Pressure(itl_s=costs.fixed_s)
    if not fleet.num:
        return Pressure(NO_ROOM, NO_ROOM)
    p, d, m = fleet.prefill, fleet.decode, fleet.mixed
    if p + m == 0:
        d, m = 0, d
    elif d + m == 0:
        p, m = 0, p
    steps = HAND_OFF_STEPS if p else ITL_MARGIN  # that a promised gap has room for
    shared = (work.prefill + work.decode) / (p + d + m) if m else 0.0
    prefill_load = max(work.prefill / (p + m), shared)
    decode_load = max(work.decode / (d + m), shared)
    _, room = _room(costs, work, ITL_MARGIN)
    longest_s = min(CEILING_S, costs.fixed_s + costs.prompt_token_s * costs.max_tokens)
    alone = max(1e-3, 1.0 - costs.fixed_s / longest_s)
    prompts = min(room, alone) if m else alone
    left = max(MIN_ROOM, prompts - work.decode / (d + m)) if m else prompts
    ttft_s, queue = _queue(prefill_load, p + m, prompts, left, work)
    itl_s = costs.fixed_s / max(1.0 - decode_load, 1e-3)
    step_limit, decode_room = _room(costs, work, steps)
    streams = work.tokens * min(itl_s, step_limit) / (d + m)
    pages = max(streams * work.context, work.held / (d + m)) / max(1, costs.kv_tokens)
    decode = max(decode_load / (decode_room * MAX_LOAD), pages / MAX_PAGES)
    return Pressure(min(queue, NO_ROOM), min(decode, NO_ROOM), ttft_s, itl_s)


def _room(costs: StepCosts, work: Work, steps: float) -> tuple[float, float]:
    """How long a step may last when a promised gap has room for so many, and what part of it is
    not fixed."""
    step_limit = max(work.itl_slo_s, 1e-4) / steps
    return step_limit, max(MIN_ROOM, 1.0 - costs.fixed_s / step_limit)


def _queue(load: float, servers: int, room: float, left: float, work: Work) -> tuple[float, float]:
    """A long prompt's first token, and the load over the one at which it is just in time. ``left``
    is what one prompt gets of a worker's time, beside the decodes there."""
    service_s = work.prompt_s / room
    own_s = work.prompt_s * (1.0 + LONG_SIGMAS * work.spread**0.5) / left
    due_s = max(work.ttft_slo_s, OWN_PART * own_s)

    def ttft_s(rho: float) -> float:
        wait = service_s * (1 + work.spread) / 2 * rho ** ((2 * (servers + 1)) ** 0.5 - 1)
        wait /= servers * (1.0 - rho)
        return float(own_s + LONG_WAIT * wait / (1.0 - rho))

    low, high = 0.0, MAX_LOAD
    if ttft_s(high) <= due_s:
        low = high
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if ttft_s(middle) <= due_s else (low, middle)
    rho = load / room
    return ttft_s(min(rho, 0.98)), rho / max(low, 0.1)
