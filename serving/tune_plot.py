"""The picture of a tuning: step time and gaps against the budget."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # no screen needed

from matplotlib import pyplot

if TYPE_CHECKING:
    from serving.deployments.tune import Tuning


def plot(tuning: "Tuning", path: Path) -> None:
    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    budgets = [step.budget for step in tuning.steps]
    axis.plot(budgets, [1e3 * s.step_s for s in tuning.steps], "o-", label="step, measured")
    axis.plot(budgets, [1e3 * s.predicted_s for s in tuning.steps], "x--", label="step, predicted")
    for check in tuning.checks:
        name = f"budget {check.budget}" if check.budget else "online budget"
        at = check.budget or tuning.online_tokens
        axis.plot([at], [1e3 * check.p99_gap_s], "s", label=f"p99 gap, {name}")
    axis.axhline(1e3 * tuning.itl_s, color="0.5", linestyle=":", label="promised gap")
    axis.set(xlabel="tokens of a step", ylabel="ms", ylim=(0, None))
    axis.grid(True, alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
