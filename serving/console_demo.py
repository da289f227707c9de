"""How the demonstration looks: gaps live on a terminal, a table and the routes everywhere."""

from collections.abc import Sequence

from rich.live import Live
from rich.table import Table

from serving.console import err, out
from serving.demo import Demo, Result, Stream

BARS = "▁▂▃▄▅▆▇█"
NUM_BARS = 48  # gaps shown of each stream, the newest at the right
FULL_BAR_S = 1.0
FRAMES_PER_S = 8
MODE_WORDS = {
    "mixed": "the prompt is cut into chunks that ride along with the chats' steps",
    "disaggregated": "another worker computes the prompt, then its KV pages move",
}


def run(demo: Demo) -> list[Result]:
    """Run both modes; on a terminal the gaps move while it lasts."""
    if not err.is_terminal:
        return demo.run(lambda result: err.print(f"{result.mode} done"))
    with Live(
        get_renderable=lambda: _frame(demo),
        console=err,
        refresh_per_second=FRAMES_PER_S,
        transient=True,
    ):
        return demo.run(lambda result: None)


def show(results: Sequence[Result]) -> None:
    """What was measured, then where each request ran and why."""
    table = Table(title="Gaps between the tokens of the chats, in milliseconds")
    table.add_column("mode")
    for name in ("alone, median", "during prefill, median", "worst", "long prompt: first token"):
        table.add_column(name, justify="right")
    for result in results:
        facts = result.summary()
        table.add_row(
            result.mode,
            _ms(facts["gap_alone_median_s"]),
            _ms(facts["gap_during_median_s"]),
            _ms(facts["gap_during_max_s"]),
            "-" if facts["long_ttft_s"] is None else f"{facts['long_ttft_s']:.1f} s",
        )
    out.print(table)
    for result in results:
        out.print(f"\n[bold]{result.mode}[/]: {MODE_WORDS[result.mode]}")
        for stream in (*result.chats, result.long):
            route = stream.route
            workers = " -> ".join(route.get("workers", ())) or "nowhere"
            out.print(f"  {stream.name:24} {workers:36} {route.get('reason', '')}", markup=False)
            if route.get("fallback"):
                out.print(f"  {'':24} KV was computed again: {route['fallback']}", markup=False)


def _frame(demo: Demo) -> Table:
    title = f"{demo.mode}: {MODE_WORDS.get(demo.mode, 'warming up')}"
    table = Table(title=title, title_justify="left", expand=False)
    table.add_column("stream")
    table.add_column(f"gaps (a full bar is {FULL_BAR_S:.0f} s)", min_width=NUM_BARS)
    for name in ("tokens", "last ms", "worst ms"):
        table.add_column(name, justify="right")
    for stream in demo.streams:
        gaps = stream.gaps_s
        table.add_row(
            stream.name,
            "".join(map(_bar, gaps[-NUM_BARS:])) or _waiting(stream),
            str(len(stream.arrivals)),
            _ms(gaps[-1] if gaps else None),
            _ms(max(gaps, default=None)),
        )
    return table


def _waiting(stream: Stream) -> str:
    if not stream.sent_at:
        return "not sent yet"
    return "one token" if stream.arrivals else "waiting for its first token"


def _bar(gap_s: float) -> str:
    return BARS[min(len(BARS) - 1, int(gap_s / FULL_BAR_S * len(BARS)))]


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1000:.0f}"
