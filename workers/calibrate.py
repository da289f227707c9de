"""Steps of made-up batches, so that a latency model knows something before the first request.

It runs them on an executor that nobody else uses yet, and keeps what they taught in a file. It
knows nothing of the model behind the executor.
"""

import json
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import xxhash

from workers.core.latency import LatencyModel, fitted, restored
from workers.core.output import Token
from workers.core.plan import Chunk, StepPlan
from workers.core.request import Phase, Request, Sampling, Sequence

CALIBRATION_S = 3.0
MAX_ROUNDS = 6
FORM = 1  # of the files; a new one makes the old ones unread

# decodes, their context, start and length of a chunk: small ones first, for slow machines
SHAPES = (
    *((1, 256, 0, 0), (0, 0, 0, 32), (4, 256, 0, 0), (4, 256, 128, 16), (0, 0, 0, 128)),
    *((8, 512, 512, 64), (16, 1024, 0, 0), (0, 0, 1024, 128), (8, 1024, 256, 128)),
    *((32, 512, 0, 0), (0, 0, 0, 256), (16, 256, 2048, 64), (2, 3000, 0, 0)),
    *((32, 1024, 1024, 192), (0, 0, 3000, 256)),
)

log = logging.getLogger(__name__)


class Executor(Protocol):
    """What it needs of ``workers.engine.Executor``."""

    def run(self, chunks: tuple[Chunk, ...]) -> dict[str, Token]: ...
    def forget(self, request_id: str) -> None: ...


class Bounds(NamedTuple):
    """What a made-up batch may hold."""

    num_pages: int
    page_size: int
    max_context: int = 4000  # of one sequence
    max_decodes: int = 32
    max_chunk: int = 512
    vocab_size: int = 1000


def known_latency(executor: Executor, bounds: Bounds, folder: Path, key: str) -> LatencyModel:
    """As an earlier process with the same ``key`` left it in ``folder``, or measured now."""
    name = xxhash.xxh3_64_hexdigest(f"{FORM} {key}".encode())
    path = folder / f"{name}.json"
    try:
        return restored(json.loads(path.read_text()))
    except (OSError, ValueError):
        pass
    latency = calibrate(executor, bounds)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"key": key, **latency.snapshot()}))
        partial.rename(path)
    except OSError as error:
        log.warning("step times are measured again at the next start: %s", error)
    return latency


def calibrate(
    executor: Executor,
    bounds: Bounds,
    max_s: float = CALIBRATION_S,
    clock: Callable[[], float] = time.monotonic,
) -> LatencyModel:
    """A model of the steps that fit ``max_s``; what would take too long is left out."""
    guess, rng, end = LatencyModel(), random.Random(0), clock() + max_s
    samples = []
    for num_decodes, context, start, length in SHAPES * MAX_ROUNDS:
        chunks = [(start, min(length, bounds.max_chunk))] if length else []
        plan = plan_of(rng, bounds, [context] * min(num_decodes, bounds.max_decodes), chunks)
        if guess.step_s(plan.shape) <= end - clock():
            samples.append((plan.shape, _run(executor, plan, clock)))
            guess.observe(*samples[-1])
    return fitted(samples)


def _run(executor: Executor, plan: StepPlan, clock: Callable[[], float]) -> float:
    """Seconds that it takes."""
    chunks = plan.chunks
    start = clock()
    executor.run(chunks)
    took_s = clock() - start
    for chunk in chunks:
        executor.forget(chunk.seq.id)
    return took_s


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
        _sequence(rng, bounds, f"decode-{i}", min(context, most - 1), 1, Phase.DECODE)
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
    prompt = tuple(rng.choices(range(bounds.vocab_size), k=num_tokens))
    seq = Sequence(Request(name, prompt, Sampling(1 << 20)))
    seq.phase, seq.num_computed = phase, start
    seq.pages = rng.choices(range(bounds.num_pages), k=-(-num_tokens // bounds.page_size))
    return seq
