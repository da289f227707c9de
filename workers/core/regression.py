"""Non-negative least squares on relative errors, one sample at a time.

    minimise  sum_i w_i (c . x_i / y_i - 1)^2  +  weight * sum_j ((c_j - prior_j) / scale_j)^2

Samples are forgotten exponentially; what no recent sample speaks of returns to the prior. It knows
vectors and numbers, and nothing of what they measure.
"""

from collections.abc import Sequence

Vector = Sequence[float]


class Memory:
    """The sums that least squares needs, over about the last ``size`` samples."""

    def __init__(self, num_features: int, size: float) -> None:
        self._keep = 1.0 - 1.0 / size
        self.products = [[0.0] * num_features for _ in range(num_features)]  # of x/y with x/y
        self.sums = [0.0] * num_features  # of x/y
        self.num_samples = 0

    def add(self, x: Vector, y: float) -> None:
        keep, row = self._keep, [value / y for value in x]
        for i, value in enumerate(row):
            line = self.products[i]
            self.products[i] = [keep * a + value * b for a, b in zip(line, row, strict=True)]
            self.sums[i] = keep * self.sums[i] + value
        self.num_samples += 1


def solve(
    memories: Sequence[Memory], prior: Vector, scale: Vector, weight: float
) -> tuple[float, ...]:
    """The coefficients, none below zero: one that would be is held at zero and the rest solved
    again, so a feature that only fits noise has no say."""
    size = len(prior)
    matrix = [[sum(m.products[i][j] for m in memories) for j in range(size)] for i in range(size)]
    target = [sum(m.sums[i] for m in memories) for i in range(size)]
    for i in range(size):
        pull = weight / (scale[i] * scale[i])
        matrix[i][i] += pull
        target[i] += pull * prior[i]
    active = list(range(size))
    while active:
        part = [[matrix[i][j] for j in active] for i in active]
        found = dict(zip(active, _gauss(part, [target[i] for i in active]), strict=True))
        # the coefficient whose wrong sign moves the predictions most
        worst = min(active, key=lambda i: found[i] * matrix[i][i] ** 0.5)
        if found[worst] >= 0:
            return tuple(found.get(i, 0.0) for i in range(size))
        active.remove(worst)
    return (0.0,) * size


def _gauss(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Solve a symmetric positive definite system by elimination; both arguments are used up."""
    size = len(target)
    for i in range(size):
        pivot = matrix[i]
        for j in range(i + 1, size):
            factor = matrix[j][i] / pivot[i]
            if factor:
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], pivot, strict=True)]
                target[j] -= factor * target[i]
    found = [0.0] * size
    for i in range(size - 1, -1, -1):
        known = sum(matrix[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (target[i] - known) / matrix[i][i]
    return found
