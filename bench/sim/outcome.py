"""What became of each simulated request, and the figures made of all of them."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from bench.report import percentile
from workers.core.request import SLO

MAX_LATE = 0.01  # of a stream's gaps may exceed the promise and it still is kept
FINISHED = ("stop", "length")
_PER_BUCKET = math.log(1.005)  # a gap is known to half a percent
_SMALLEST_S = 1e-6


@dataclass(slots=True)
class Outcome:
    """One request from its arrival to its end. Times are seconds of virtual time."""

    arrived_at: float
    num_prompt: int
    slo: SLO
    reason: str = ""  # why it ended: "length", "aborted", "refused: ...", "error: ..."
    mode: str = ""
    first_at: float = 0.0
    last_at: float = 0.0
    num_output: int = 0
    num_late: int = 0  # gaps longer than promised
    num_replays: int = 0
    num_fallbacks: int = 0

    @property
    def is_finished(self) -> bool:
        return self.reason in FINISHED

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrived_at

    @property
    def e2e_s(self) -> float:
        return self.last_at - self.arrived_at

    @property
    def tpot_s(self) -> float:
        """The mean gap; 0 for an answer of one token."""
        return (self.last_at - self.first_at) / max(1, self.num_output - 1)

    @property
    def is_in_time(self) -> bool:
        return self.is_finished and self.ttft_s <= self.slo.ttft_s

    @property
    def is_even(self) -> bool:
        """At most 1 % of its gaps are longer than promised."""
        return self.is_finished and self.num_late <= MAX_LATE * (self.num_output - 1)

    @property
    def is_good(self) -> bool:
        return self.is_in_time and self.is_even


class Gaps:
    """Every gap between two tokens, counted in buckets of half a percent: millions cost nothing."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._last = (-1.0, 0)  # gaps of one step are mostly equal

    def add(self, gap_s: float, times: int = 1) -> None:
        last, bucket = self._last
        if gap_s != last:
            bucket = int(math.log(max(gap_s, _SMALLEST_S) / _SMALLEST_S) / _PER_BUCKET)
            self._last = (gap_s, bucket)
        self.counts[bucket] = self.counts.get(bucket, 0) + times

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def percentile(self, percent: float) -> float:
        """Nearest rank, the middle of its bucket. NaN when there is none."""
        rank, seen = math.ceil(self.total * percent / 100), 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return _SMALLEST_S * math.exp((bucket + 0.5) * _PER_BUCKET)
        return float("nan")


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures. Rates are per second of the run: first arrival to last token."""

    num_requests: int
    num_finished: int
    num_refused: int
    span_s: float
    rate: float  # requests that arrived
    goodput: float  # requests that kept both promises
    attainment: float  # part of all requests that kept both
    attainment_ttft: float
    attainment_itl: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    output_tokens: int
    gpu_s_per_1k_tokens: float  # every GPU counts from first arrival to last token
    part_split: float  # of the routed requests
    num_replays: int
    num_fallbacks: int
    busy: float  # mean part of the time that a worker spends in steps
    num_preemptions: int
    cached_part: float  # of the prompt tokens

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def summarize(
    outcomes: list[Outcome],
    gaps: Gaps,
    *,
    num_gpus: int,
    busy: float = 0.0,
    num_preemptions: int = 0,
    cached_tokens: int = 0,
) -> Summary:
    finished = [o for o in outcomes if o.is_finished]
    start = min((o.arrived_at for o in outcomes), default=0.0)
    end = max((o.last_at for o in finished), default=start)
    span_s = max(end - start, 1e-9)
    routed = [o for o in outcomes if o.mode]
    tokens = sum(o.num_output for o in outcomes)
    prompt_tokens = sum(o.num_prompt for o in outcomes)
    ttfts, e2es = sorted(o.ttft_s for o in finished), sorted(o.e2e_s for o in finished)
    return Summary(
        num_requests=len(outcomes),
        num_finished=len(finished),
        num_refused=sum(o.reason.startswith("refused") for o in outcomes),
        span_s=span_s,
        rate=len(outcomes) / span_s,
        goodput=sum(o.is_good for o in outcomes) / span_s,
        attainment=_part(o.is_good for o in outcomes),
        attainment_ttft=_part(o.is_in_time for o in outcomes),
        attainment_itl=_part(o.is_even for o in outcomes),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        itl_p50_s=gaps.percentile(50),
        itl_p99_s=gaps.percentile(99),
        e2e_p50_s=percentile(e2es, 50),
        e2e_p99_s=percentile(e2es, 99),
        output_tokens=tokens,
        gpu_s_per_1k_tokens=num_gpus * span_s * 1000 / max(1, tokens),
        part_split=_part(o.mode == "disaggregated" for o in routed),
        num_replays=sum(o.num_replays for o in outcomes),
        num_fallbacks=sum(o.num_fallbacks for o in outcomes),
        busy=busy,
        num_preemptions=num_preemptions,
        cached_part=cached_tokens / max(1, prompt_tokens),
    )


def _part(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
