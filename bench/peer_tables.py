"""The two tables of the comparison: figures per server, and Evenflow against each peer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.report import markdown

Summary = dict[str, float]  # median, min, max, num

# figure -> (what it is called in the table, whether more of it is better)
FIGURES: dict[str, tuple[str, bool]] = {
    "decode_tok_s": ("one stream, decode, tok/s", True),
    "prefill_512_tok_s": ("prefill of 512 tokens, tok/s", True),
    "prefill_2000_tok_s": ("prefill of 2,000 tokens, tok/s", True),
    "prefill_4000_tok_s": ("prefill of 4,000 tokens, tok/s", True),
    "cold_ttft_s": ("a prompt of 2,000 tokens: TTFT, s", False),
    "again_ttft_s": ("… the same prompt again: TTFT, s", False),
    "again_times_faster": ("… times faster", True),
    "throughput_tok_s": ("16 at once, 128 in, 128 out, output tok/s", True),
    "longest_gap_s": ("8 streams + a long prompt: longest gap, s", False),
    "p99_gap_during_s": ("… p99 gap during its prefill, s", False),
    "long_ttft_s": ("… TTFT of the long prompt, s", False),
    "short_behind_ttft_s": ("… TTFT of a short prompt behind it, s", False),
    "background_tok_s": ("… the streams during its prefill, tok/s", True),
    "quiet_tok_s": ("… the streams before it, tok/s", True),
}
OPEN_LOOP = {  # these end in the rate, or in "trace"
    "goodput_": ("goodput, requests/s", True),
    "short_ttft_p90_s_": ("p90 TTFT of short prompts, s", False),
    "p99_gap_s_": ("p99 gap, s", False),
}
FACTS = {  # no ratio is drawn from these
    "errors_": "requests with errors or too late",
    "start_up_s": "start-up, s",
    "memory_gib": "memory after the loads, GiB",
    "matmul_gflop_s": "the machine before it: bf16 matmul, GFLOP/s",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One server's results."""

    name: str
    kind: str
    figures: dict[str, Summary]
    failed: dict[str, str]  # load -> why there are no figures
    settings: dict[str, Any] = field(default_factory=dict)


def tables(columns: Sequence[Column]) -> str:
    names = list(dict.fromkeys(name for column in columns for name in column.figures))
    shown = [(name, *known) for name in names if (known := _known(name)) is not None]
    rows = [
        [label, *(_cell(column.figures.get(name)) for column in columns)]
        for name, label, _ in shown
    ]
    text = markdown(["median (min-max)", *(column.name for column in columns)], rows)
    text += "\n" + _ratios(columns, shown) + "\n" + goodput_verdict(columns)
    for column in columns:
        for load, why in column.failed.items():
            text += f"\n{column.name}, {load}: failed. {why}\n"
    lines = [f"- {c.name}: `{c.settings['command']}`{_env(c)}" for c in columns if c.settings]
    return text + "\n" + "\n".join(lines) + "\n"


def ratio(name: str, ours: Summary, theirs: Summary) -> float:
    """How many times better ours is, of the medians: above 1 is better, whatever the unit."""
    known = _known(name)
    assert known is not None, name
    a, b = ours["median"], theirs["median"]
    better, worse = (a, b) if known[1] else (b, a)
    if worse == 0:
        return math.inf if better else 1.0
    return better / worse


def goodput_verdict(columns: Sequence[Column]) -> str:
    """Evenflow's goodput at the rate where the best peer's peaks. Empty without both."""
    peaks = [
        (summary["median"], name, column)
        for column in columns
        for name, summary in column.figures.items()
        if name.startswith("goodput_at_") and column.kind != "evenflow"
    ]
    if not peaks:
        return ""
    peak, name, peer = max(peaks, key=lambda each: each[0])
    text = f"The best peer's goodput peaks at {name[len('goodput_at_') :]} requests/s asked: "
    text += f"{peer.name} serves {peak:g}/s"
    for own in columns:
        if own.kind == "evenflow" and name in own.figures:
            times = ratio(name, own.figures[name], peer.figures[name])
            text += f", {own.name} {own.figures[name]['median']:g}/s ({times:.2f} times)"
    return text + ".\n"


def _ratios(columns: Sequence[Column], shown: list[tuple[str, str, bool | None]]) -> str:
    """A row per figure and Evenflow setting, a column per peer, the last for the best of them."""
    ours = [column for column in columns if column.kind == "evenflow"]
    peers = [column for column in columns if column.kind != "evenflow"]
    rows = []
    for name, label, is_more_better in shown:
        for own in ours if is_more_better is not None else []:
            if name not in own.figures:
                continue
            ratios = {
                peer.name: ratio(name, own.figures[name], peer.figures[name])
                for peer in peers
                if name in peer.figures
            }
            cells = [f"{ratios[p.name]:.2f}" if p.name in ratios else "" for p in peers]
            best = f"{min(ratios.values()):.2f}" if ratios else ""
            rows.append([f"{label} ({own.name})", *cells, best])
    if not rows or not peers:
        return ""
    return markdown(["times better", *(peer.name for peer in peers), "best peer"], rows)


def _known(name: str) -> tuple[str, bool | None] | None:
    """Label and direction of a figure; None for one that is not shown."""
    if name in FIGURES:
        return FIGURES[name]
    if name in FACTS:
        return FACTS[name], None
    for prefix, (label, is_more_better) in OPEN_LOOP.items():
        if name.startswith(prefix):
            return f"{_load_label(name[len(prefix) :])}: {label}", is_more_better
    if name.startswith("errors_"):
        return f"{_load_label(name[len('errors_') :])}: {FACTS['errors_']}", None
    return None


def _load_label(suffix: str) -> str:
    return f"Poisson mix, {suffix[3:]}/s" if suffix.startswith("at_") else "trace"


def _cell(summary: Summary | None) -> str:
    if summary is None:
        return "failed"
    text = f"{summary['median']:g}"
    return text if summary["num"] == 1 else f"{text} ({summary['min']:g}-{summary['max']:g})"


def _env(column: Column) -> str:
    kept = column.settings["env"]
    return " with " + ", ".join(f"`{key}={value}`" for key, value in kept.items()) if kept else ""
