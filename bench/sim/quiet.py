"""Steps in which nothing can happen but one more token for each decode: when each of them ends.

Computed ahead, so that the clock need not stop at each. Whoever looks at the worker in between, or
sends it something, first lets it catch up, and finds what it would have found.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

from bench.sim.latency import Latency
from workers.core.plan import BatchShape, StepPlan

MAX_STEPS = 16  # looked ahead: somebody comes soon


@dataclass(slots=True, eq=False)
class QuietRun:
    """Steps with the same decodes, one after the other. The last one ends the run; how many of
    the others have been caught up with is ``num_done``."""

    plan: StepPlan
    shapes: list[BatchShape] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # that each takes
    ends: list[float] = field(default_factory=list)
    num_done: int = 0

    def over(self, now: float) -> int:
        """How many have ended since, the last one never among them."""
        return bisect_right(self.ends, now, self.num_done, len(self.ends) - 1) - self.num_done

    def cut(self) -> None:
        """Somebody came: the run ends with the step that is under way."""
        for values in (self.shapes, self.seconds, self.ends):
            del values[self.num_done + 1 :]


def look_ahead(
    plan: StepPlan, num_steps: int, now: float, latency: Latency, host_s: float
) -> QuietRun:
    """The next so many steps."""
    run, num, context = QuietRun(plan), len(plan.decodes), plan.shape.decode_context
    run.shapes = [BatchShape(0, 0, num, context + i * num) for i in range(num_steps)]
    for shape in run.shapes:
        seconds = latency.step_s(shape) + host_s
        now += seconds
        run.seconds.append(seconds)
        run.ends.append(now)
    return run
