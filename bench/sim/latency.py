"""How long a step and a transfer take: the one thing the twin does not compute itself.

Anything with ``step_s`` and ``transfer_s`` will do: coefficients given by hand (here), tables of
measured steps (``bench.sim.profiles``), or the model that a live worker fitted to its own steps.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from workers.calibrate import MAX_ROUNDS, SHAPES
from workers.core.latency import LatencyModel, fitted, restored
from workers.core.plan import BatchShape


class Latency(Protocol):
    """What ``workers.core.latency`` promises as well."""

    def step_s(self, shape: BatchShape) -> float:
        """Seconds that one step with such a batch takes."""
        ...

    def __hash__(self) -> int: ...

    def transfer_s(self, num_bytes: int, pair: str = "") -> float:
        """Seconds to bring so many bytes of pages from one worker to another, alone on the link."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between two workers."""

    fixed_s: float = 1e-3
    bytes_per_s: float = 25e9

    def transfer_s(self, num_bytes: int, pair: str = "") -> float:
        return self.fixed_s + num_bytes / self.bytes_per_s


DEFAULT_LINK = Link()


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A step is linear in its tokens, its attention and its decodes. The defaults resemble an 8B
    model on one A100."""

    fixed_s: float = 9e-3
    prefill_token_s: float = 5e-5  # per prompt token
    attention_s: float = 1.5e-9  # per prompt token and token of its context
    decode_s: float = 2e-5  # per decode
    context_s: float = 5e-8  # per token of a decode's context
    link: Link = DEFAULT_LINK

    def step_s(self, shape: BatchShape) -> float:
        return (
            self.fixed_s
            + self.prefill_token_s * shape.prefill_tokens
            + self.attention_s * shape.prefill_context
            + self.decode_s * shape.decode_seqs
            + self.context_s * shape.decode_context
        )

    def transfer_s(self, num_bytes: int, pair: str = "") -> float:
        return self.link.transfer_s(num_bytes, pair)


def calibrated(latency: Latency) -> LatencyModel:
    """What a worker with such steps knows of itself when it starts, as live: from the same shapes
    as ``workers.calibrate`` runs."""
    return restored(_calibration(latency))


@lru_cache(maxsize=64)
def _calibration(latency: Latency) -> dict[str, object]:
    shapes = [
        BatchShape(length, length * (start + length), num_decodes, num_decodes * context)
        for num_decodes, context, start, length in SHAPES * MAX_ROUNDS
    ]
    return fitted([(shape, latency.step_s(shape)) for shape in shapes]).snapshot()
