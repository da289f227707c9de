"""What clients ask for and how long they wait, counted at arrival and not when they are served.

A request that waits is in the figures for as long as it waits, so a queue is seen while it grows
and not when it has been served. It knows arrivals, promises and answers, and no workers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from workers.core.budget import PATIENCE

STEADY_S = 60.0  # the window that rates are means of, unless told otherwise
OUTPUT_GAIN = 0.05  # of the mean length of answers, which changes slowly
FIRST_OUTPUT = 128.0  # tokens, before any answer has ended; less when nobody asks for so many
MIN_SPAN_S = 1.0
LATE_PART = 0.01  # of gaps
MIN_GAPS = 50
TREND_S = 120.0  # over which growth is looked for
LONGER_S = (120.0, 300.0)  # what rates are means of while they stay the same
ALIKE_SIGMAS = 2.0  # within chance, as far as a mean is concerned
MIN_TREND = 6  # periods
MAX_GROWTH = 2.0
SIGMAS = 3.0  # more than chance


@dataclass(frozen=True, slots=True)
class Window:
    """What arrived in a span of time."""

    span_s: float
    num_arrived: int = 0
    prompt_tokens: int = 0
    prompt_squares: float = 0.0  # sum of squared prompt lengths: what attention costs

    @property
    def chance(self) -> float:
        """By what part the prompt tokens of such a window may be off: the standard deviation."""
        if not self.num_arrived:
            return 0.0
        mean, square = self.prompt_tokens / self.num_arrived, self.prompt_squares / self.num_arrived
        return float((square / max(mean * mean, 1.0) / self.num_arrived) ** 0.5)


@dataclass(frozen=True, slots=True)
class DemandStats:
    """The demand of one gateway. Ratios are waits over what was promised: above 1 is a breach."""

    steady: Window
    recent: Window  # since the reading before
    mean_output: float  # tokens of an answer
    num_waiting: int  # requests without a first token, now
    oldest_ratio: float  # of those, the longest wait over its promise
    ttft_p90_s: float  # of those answered in ``recent`` and those that wait, as they feel it so far
    ttft_p90_ratio: float
    num_gaps: int  # between tokens, in ``recent``
    num_late: int  # of these, longer than promised
    ttft_slo_s: float  # the median promise of ``steady``
    itl_slo_s: float

    @property
    def broken(self) -> str:
        """The promises that are not kept, in words; "" when all are."""
        broken = []
        ratio = max(self.ttft_p90_ratio, self.oldest_ratio)
        if ratio > 1:
            broken.append(f"first tokens take {ratio:.1f} times what was promised")
        if self.num_gaps >= MIN_GAPS and self.num_late > LATE_PART * self.num_gaps:
            broken.append(f"{self.num_late / self.num_gaps:.0%} of the gaps are late")
        return " and ".join(broken)


@dataclass(slots=True)
class _Seen:
    at: float
    prompt_tokens: int
    ttft_slo_s: float
    itl_slo_s: float


def _nothing(_: float) -> float:
    return 0.0


class DemandMeter:
    """Fed by a gateway with each sequence; memory is bounded by what arrives in one window and by
    what waits. Not thread-safe."""

    def __init__(self, started_at: float = 0.0, steady_s: float = STEADY_S) -> None:
        self._started_at = self._read_at = started_at
        self._steady_s = steady_s
        self._seen: deque[_Seen] = deque()  # by arrival
        self._waiting: dict[str, _Seen] = {}
        self._answered: list[tuple[float, _Seen]] = []  # with their waits, since the last reading
        self._mean_output = 0.0
        self._longest_asked = 0
        self._num_gaps = self._num_late = 0  # since the last reading
        self._slo = (0.0, 0.0)

    def arrived(
        self,
        key: str,
        prompt_tokens: int,
        max_output: int,
        ttft_slo_s: float,
        itl_slo_s: float,
        now: float,
    ) -> None:
        seen = _Seen(now, prompt_tokens, max(ttft_slo_s, 1e-3), max(itl_slo_s, 1e-4))
        self._seen.append(seen)
        self._waiting[key] = seen
        self._longest_asked = max(self._longest_asked, max_output)

    def answered(self, key: str, now: float) -> None:
        """Its first token is out. Idempotent."""
        seen = self._waiting.pop(key, None)
        if seen is not None:
            self._answered.append((now - seen.at, seen))

    def left(self, key: str) -> None:
        """It will never have a token, or is over. Idempotent."""
        self._waiting.pop(key, None)

    def gaps(self, num: int, num_late: int) -> None:
        """So many gaps between tokens ended, some of them later than promised."""
        self._num_gaps += num
        self._num_late += num_late

    def finished(self, num_output: int) -> None:
        """An answer ended with so many tokens."""
        if not self._mean_output:
            self._mean_output = float(num_output)
        self._mean_output += OUTPUT_GAIN * (num_output - self._mean_output)

    def read(self, now: float, prompt_s: Callable[[float], float] = _nothing) -> DemandStats:
        """Everything until now; the next ``recent`` begins here. ``prompt_s`` tells how long a
        prompt of so many tokens is computed: one too long for its promise is due later."""

        def ratio(wait_s: float, seen: _Seen) -> float:
            return wait_s / max(seen.ttft_slo_s, PATIENCE * prompt_s(seen.prompt_tokens))

        while self._seen and self._seen[0].at < now - self._steady_s:
            self._seen.popleft()
        waiting = [(now - seen.at, seen) for seen in self._waiting.values()]
        waits = self._answered + waiting
        if self._seen:
            self._slo = (
                _middle([s.ttft_slo_s for s in self._seen]),
                _middle([s.itl_slo_s for s in self._seen]),
            )
        stats = DemandStats(
            steady=_window(self._seen, now - max(self._started_at, now - self._steady_s)),
            recent=_window((s for s in self._seen if s.at >= self._read_at), now - self._read_at),
            mean_output=self._mean_output or min(FIRST_OUTPUT, float(self._longest_asked)),
            num_waiting=len(self._waiting),
            oldest_ratio=max((ratio(*wait) for wait in waiting), default=0.0),
            ttft_p90_s=_p90([wait for wait, _ in waits]),
            ttft_p90_ratio=_p90([ratio(*wait) for wait in waits]),
            num_gaps=self._num_gaps,
            num_late=self._num_late,
            ttft_slo_s=self._slo[0],
            itl_slo_s=self._slo[1],
        )
        self._read_at, self._num_gaps, self._num_late = now, 0, 0
        self._answered.clear()
        return stats


class Trend:
    """What arrived lately, period by period: how much for how long, and whether it grows."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Window]] = deque()  # what arrived until then
        self._horizon_s = 0.0

    def note(self, recent: Window, now: float, horizon_s: float) -> None:
        """``horizon_s`` is how long a replica asked for now would take."""
        self._seen.append((now, recent))
        self._horizon_s = horizon_s
        while self._seen[0][0] <= now - LONGER_S[-1]:
            self._seen.popleft()

    def steady(self, minute: Window) -> Window:
        """The longest window that ``minute``, its end, does not stand out of by more than chance:
        the longer a mean, the better it is known."""
        best = minute
        for span_s in LONGER_S:
            longer = _sum(self._since(span_s))
            if longer.span_s <= best.span_s or not _alike(minute, longer):
                break
            best = longer
        return best

    def factor(self, steady: Window) -> float:
        """By how much arrivals will have grown since ``steady`` when a replica asked for now would
        be there. 1 unless the growth is clearly more than chance: a line through the counts."""
        seen = self._since(TREND_S)
        if len(seen) < MIN_TREND:
            return 1.0
        times = [at - window.span_s / 2 for at, window in seen]
        rates = [window.num_arrived / window.span_s for _, window in seen]
        middle, mean = sum(times) / len(times), sum(rates) / len(rates)
        square = sum((t - middle) ** 2 for t in times)
        slope = sum((t - middle) * rate for t, rate in zip(times, rates, strict=True)) / square
        last, window = seen[-1]
        chance = (mean / window.span_s / square) ** 0.5
        if mean <= 0 or slope <= SIGMAS * chance:
            return 1.0
        then = mean + slope * (last + self._horizon_s - middle)
        was = mean + slope * (last - steady.span_s / 2 - middle)
        return min(MAX_GROWTH, max(1.0, then / max(was, mean / 2)))

    def _since(self, span_s: float) -> list[tuple[float, Window]]:
        return [(at, window) for at, window in self._seen if at > self._seen[-1][0] - span_s]


def _sum(seen: Iterable[tuple[float, Window]]) -> Window:
    windows = [window for _, window in seen]
    return Window(
        sum(w.span_s for w in windows),
        sum(w.num_arrived for w in windows),
        sum(w.prompt_tokens for w in windows),
        sum(w.prompt_squares for w in windows),
    )


def is_busier(recent: Window, steady: Window) -> bool:
    """More arrived in the last period than chance explains."""
    expected = steady.num_arrived / steady.span_s * recent.span_s
    variance = max(expected, 1.0) * max(1.0, steady.chance**2 * steady.num_arrived)
    return recent.num_arrived > expected + SIGMAS * float(variance**0.5)


def chance_of(counts: Sequence[int], spread: float) -> float:
    """By what part the work of all these periods may be off. The variance of their counts is their
    mean when arrivals are independent, and more when they come in bursts."""
    total, mean = sum(counts), sum(counts) / len(counts)
    if not total:
        return 0.0
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    return float((max(1.0, variance / mean) * (1.0 + spread) / total) ** 0.5)


def _alike(minute: Window, longer: Window) -> bool:
    """In requests and in prompt tokens."""
    part = minute.span_s / longer.span_s
    num, tokens = longer.num_arrived * part, longer.prompt_tokens * part
    chance = longer.chance * tokens / max(part, 1e-9) ** 0.5
    same_num: bool = abs(minute.num_arrived - num) <= ALIKE_SIGMAS * max(num, 1.0) ** 0.5
    return same_num and abs(minute.prompt_tokens - tokens) <= ALIKE_SIGMAS * chance


def _window(seen: Iterable[_Seen], span_s: float) -> Window:
    lengths = [s.prompt_tokens for s in seen]
    return Window(
        max(MIN_SPAN_S, span_s), len(lengths), sum(lengths), float(sum(n * n for n in lengths))
    )


def _p90(values: list[float]) -> float:
    """Nearest rank; 0 for none."""
    ranked = sorted(values)
    return ranked[-(-len(ranked) * 9 // 10) - 1] if ranked else 0.0


def _middle(values: list[float]) -> float:
    ranked = sorted(values)
    return ranked[len(ranked) // 2]
