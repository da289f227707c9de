"""Steps of made-up batches, so that a latency model knows something before the first request.

It runs them on an executor that nobody else uses yet. It knows nothing of the model behind it.
"""

import random
from typing import NamedTuple

from workers.core.plan import Chunk, StepPlan
from workers.core.request import Phase, Request, Sampling, Sequence


class Bounds(NamedTuple):
    """What a made-up batch may hold."""

    num_pages: int
    page_size: int
    max_context: int = 4000  # of one sequence
    max_decodes: int = 32
    max_chunk: int = 512


def random_plan(rng: random.Random, bounds: Bounds) -> StepPlan:
    """Decodes, a chunk, or both; short and long contexts alike."""
    num_decodes = rng.choice((0, 1, rng.randint(0, bounds.max_decodes)))
    has_chunk = num_decodes == 0 or rng.random() < 0.6
    decodes = [_context(rng, bounds.max_context) for _ in range(num_decodes)]
    chunk = _context(rng, bounds.max_context), rng.randint(1, bounds.max_chunk)
    return plan_of(rng, bounds, decodes, [chunk] if has_chunk else [])


def plan_of(
    rng: random.Random, bounds: Bounds, decodes: list[int], chunks: list[tuple[int, int]]
) -> StepPlan:
    """A step of decodes with these contexts, and of chunks (start, length)."""
    most = min(bounds.max_context, bounds.num_pages * bounds.page_size - 1)
    sequences = tuple(
        _sequence(rng, bounds, f"decode-{i}", min(context, most), 1, Phase.DECODE)
        for i, context in enumerate(decodes)
    )
    prefills = []
    for i, (start, length) in enumerate(chunks):
        length = min(length, most)
        start = min(start, most - length)
        seq = _sequence(rng, bounds, f"chunk-{i}", start, length, Phase.PREFILL)
        prefills.append(Chunk(seq, start, length))
    return StepPlan(sequences, tuple(prefills))


def _context(rng: random.Random, most: int) -> int:
    return rng.randint(0, rng.choice((256, 1024, most)))


def _sequence(
    rng: random.Random, bounds: Bounds, name: str, start: int, length: int, phase: Phase
) -> Sequence:
    """One whose first ``start`` tokens count as computed. Pages are drawn at random: what they
    hold does not matter."""
    num_tokens = start + length
    seq = Sequence(Request(name, tuple(rng.choices(range(1000), k=num_tokens)), Sampling(1 << 20)))
    seq.phase, seq.num_computed = phase, start
    seq.pages = rng.choices(range(bounds.num_pages), k=-(-num_tokens // bounds.page_size))
    return seq
