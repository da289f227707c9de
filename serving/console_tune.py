"""How a tuning looks on a terminal or in a file."""

from typing import TYPE_CHECKING

from rich.table import Table

from serving import console

if TYPE_CHECKING:
    from serving.deployments.tune import Tuning


def show(tuning: "Tuning") -> None:
    out = console.out
    steps = Table(title=f"Full steps; the promised gap is {1e3 * tuning.itl_s:.0f} ms")
    for column in ("budget", "step ms", "predicted ms", "fits"):
        steps.add_column(column, justify="right")
    for step in tuning.steps:
        measured, predicted = f"{1e3 * step.step_s:.1f}", f"{1e3 * step.predicted_s:.1f}"
        steps.add_row(str(step.budget), measured, predicted, "yes" if step.fits else "no")
    out.print(steps)
    checks = Table(title="Streams with a long prompt among them")
    for column in ("budget", "median gap ms", "p99 gap ms", "gaps kept", "long TTFT s"):
        checks.add_column(column, justify="right")
    for check in tuning.checks:
        checks.add_row(
            str(check.budget or "online"),
            f"{1e3 * check.p50_gap_s:.1f}",
            f"{1e3 * check.p99_gap_s:.1f}",
            f"{check.kept:.1%}",
            f"{check.ttft_s:.2f}",
        )
    out.print(checks)
    out.print(f"Without prompts a step takes {1e3 * tuning.alone_s:.1f} ms.")
    out.print(f"The online budget would give the same step {tuning.online_tokens} prompt tokens.")
    if tuning.best is None:
        out.print("No fixed budget fits: promise longer gaps, or serve fewer streams at once.")
        return
    out.print("\nTo fix the budget (without it, the online one is used):\n")
    out.print(snippet(tuning), markup=False)


def snippet(tuning: "Tuning") -> str:
    """Lines for the configuration file."""
    return f"max_num_batched_tokens: {tuning.best}\nslo:\n  itl: {1e3 * tuning.itl_s:.0f}ms"
