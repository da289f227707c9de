"""Step times that others measured and published, as latency models.

Each reader says what its numbers contain. Files lie in ``bench/catalogue`` (see its README for
sources and licences) or are given by path.
"""

import csv
import json
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.sim.latency import DEFAULT_LINK, Link
from workers.core.plan import BatchShape

CATALOGUE = Path(__file__).parents[1] / "catalogue"


class Line:
    """A measured curve: straight between its points, and beyond them as steep as at its ends."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        if not points:
            raise ValueError("a curve needs a point")
        self.xs = [x for x, _ in sorted(points)]
        self.ys = [y for _, y in sorted(points)]

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        i = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
        return ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i])


@dataclass(frozen=True, slots=True)
class DistServeTimes:
    """Coefficients that DistServe fitted to its own engine, in milliseconds. It never mixes prompts
    and decodes in a step; where we do, the two times add."""

    prefill: tuple[float, float, float]  # fixed, per token, per squared prompt length
    decode_few: tuple[float, float, float]  # fixed, per context token, per decode
    decode_many: tuple[float, float, float]
    many: int  # decodes from which the second set holds
    max_tokens: int  # whose KV fits
    link: Link = DEFAULT_LINK

    def step_s(self, shape: BatchShape) -> float:
        total_ms = 0.0
        if shape.prefill_tokens:
            a, b, c = self.prefill
            total_ms += a + b * shape.prefill_tokens + c * shape.prefill_context
        if shape.decode_seqs:
            a, b, c = self.decode_few if shape.decode_seqs < self.many else self.decode_many
            total_ms += a + b * (shape.decode_context + shape.decode_seqs) + c * shape.decode_seqs
        return total_ms / 1000

    def transfer_s(self, num_bytes: int, pair: str = "") -> float:
        return self.link.transfer_s(num_bytes, pair)


def distserve(model: str, tp: int, link: Link = DEFAULT_LINK) -> DistServeTimes:
    """OPT on A100-80G: "facebook/opt-13b" (tp 1, 2, 4) or "facebook/opt-66b" (2 to 8)."""
    rows = json.loads((CATALOGUE / "distserve_a100.json").read_text())[model][str(tp)]
    few, many = tuple(rows["decoding_smallbs"]), tuple(rows["decoding_largebs"])
    threshold, fits = rows["decoding_large_small_bs_threshold"], rows["max_tokens"]
    return DistServeTimes(tuple(rows["prefill"]), few, many, threshold, fits, link)


@dataclass(frozen=True, slots=True)
class CurveTimes:
    """Prompt steps by their tokens, decode steps by their number: two measured curves and the
    attention that they leave out. A mixed step costs the longer curve's fixed part once."""

    prefill: Line  # tokens of one whole prompt -> seconds, its own attention included
    decode: Line  # decodes -> seconds, at ``context`` tokens each
    attention_s: float  # of a whole prompt, per squared token: half of its square is masked
    context_s: float  # per token of a decode's context
    context: float = 0.0  # tokens that each measured decode had
    link: Link = DEFAULT_LINK

    def step_s(self, shape: BatchShape) -> float:
        p, n = shape.prefill_tokens, shape.decode_seqs
        total = 0.0
        if p:
            beyond = shape.prefill_context - p * p  # earlier chunks, seen in full: twice the cost
            total = self.prefill(p) + self.attention_s * (2 * beyond if beyond > 0 else beyond)
        if n:
            decode = self.decode(n) + self.context_s * (shape.decode_context - n * self.context)
            total += decode - self.decode(0) if p else decode
        return max(total, 1e-4)

    def transfer_s(self, num_bytes: int, pair: str = "") -> float:
        return self.link.transfer_s(num_bytes, pair)


def sarathi_yi34b(attention_s: float | None = None) -> CurveTimes:
    """Yi-34B on two A100, measured by Sarathi-Serve's authors: whole steps. The attention of a
    chunk to earlier chunks is not in their curves: it is what bends the prefill curve, unless
    given."""
    prefill = _measured("sarathi_yi34b_tp2_figure_2_prefill.csv")
    decode = _measured("sarathi_yi34b_tp2_figure_2_decode.csv")
    bend = _bend(prefill) if attention_s is None else attention_s
    return CurveTimes(Line(prefill), Line(decode), bend, 0.0)


def _measured(name: str) -> list[tuple[float, float]]:
    with (CATALOGUE / name).open(newline="") as file:
        return [
            (float(row["batch_num_tokens"]), float(row["batch_execution_time"]))
            for row in csv.DictReader(file)
        ]


def _bend(points: list[tuple[float, float]]) -> float:
    """The c of t = a*x + c*x^2 through the points, by least squares on t/x."""
    xs = [x for x, _ in points if x >= 512]
    ys = [y / x for x, y in points if x >= 512]
    slope, _ = statistics.linear_regression(xs, ys)
    return slope


def llama3_8b(gpu: str, link: Link = DEFAULT_LINK) -> CurveTimes:
    """Llama-3-8B bf16 on one "a100", "h100" or "h200": GEMM and attention times of all layers,
    without head, norms, sampling and CPU time."""
    prefill, decode, attention = [], [], []
    with (CATALOGUE / "llama3_8b_step_times.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["device"] != gpu or not row["gemm_plus_attn_ms"]:
                continue
            linear, attn = float(row["linear_ms"]) / 1000, float(row["attention_ms"]) / 1000
            if row["phase"] == "prefill":
                prefill.append((float(row["tokens"]), linear + attn))
                attention.append((float(row["tokens"]) ** 2, attn))
            else:
                decode.append((float(row["batch"]), float(row["context"]), linear, attn))
    if not prefill:
        raise ValueError(f"{gpu!r} is not one of a100, h100, h200")
    slope, _ = statistics.linear_regression(*zip(*attention, strict=True))
    per_context, fixed = statistics.linear_regression(
        [n * k for n, k, _, _ in decode], [attn for _, _, _, attn in decode]
    )
    linear_by_n = {n: linear + fixed for n, _, linear, _ in decode}
    return CurveTimes(Line(prefill), Line(list(linear_by_n.items())), slope, per_context, link=link)


def splitwise(model: str, gpu: str, tp: int, link: Link = DEFAULT_LINK) -> CurveTimes:
    """Whole steps of "llama2-70b" or "bloom-176b" on "a100-80gb" or "h100-80gb", by Splitwise's
    authors; decodes at 512 to 640 tokens of context, whose growth they did not measure."""
    prefill: dict[float, list[float]] = {}
    decode: dict[float, list[float]] = {}
    with (CATALOGUE / "splitwise_step_times.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"], int(row["tp"])) == (model, gpu, tp):
                size, batch = float(row["prompt_size"]), float(row["batch_size"])
                prefill.setdefault(size * batch, []).append(float(row["prompt_ms"]) / 1000)
                decode.setdefault(batch, []).append(float(row["token_ms"]) / 1000)
    if not prefill:
        raise ValueError(f"no profile of {model!r} on {gpu!r} with {tp=}")
    curves = [[(x, statistics.median(ys)) for x, ys in c.items()] for c in (prefill, decode)]
    return CurveTimes(Line(curves[0]), Line(curves[1]), _bend(curves[0]), 0.0, link=link)
