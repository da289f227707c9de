"""Pictures of benchmark runs."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen needed

from matplotlib import pyplot

from bench.report import Record


def plot_gaps(runs: dict[str, list[Record]], path: Path) -> Path:
    """Every gap of every stream at the time it ended, a panel per run; the long prompt's prefill
    is shaded. The last record of a run is the long prompt."""
    figure, axes = pyplot.subplots(
        len(runs), 1, figsize=(10, 2.6 * len(runs)), sharex=True, sharey=True, squeeze=False
    )
    for axis, (name, records) in zip(axes[:, 0], runs.items(), strict=True):
        *streams, long = records
        start = min(record.sent_at for record in streams)
        for record in streams:
            ends = [at - start for at in record.token_times[1:]]
            axis.plot(ends, record.gaps_s, ".", markersize=3)
        axis.axvspan(long.sent_at - start, long.token_times[0] - start, color="0.9", zorder=0)
        axis.set(
            yscale="log", ylabel="gap, s", title=f"{name}: grey while the long prompt prefills"
        )
        axis.grid(True, which="major", alpha=0.3)
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
