"""Calibration measures made-up steps in a few seconds, once."""

import json
import random

import pytest

from workers.calibrate import Bounds, calibrate, known_latency, random_plan
from workers.core.latency import features
from workers.core.plan import BatchShape
from workers.fake import FakeRunner

CPU = (0.013, 2e-4, 3e-7, 6e-4, 1.1e-6, 5e-4)
BOUNDS = Bounds(num_pages=256, page_size=16, max_context=2000)


class Machine(FakeRunner):
    """Steps take virtual time."""

    def __init__(self, slow: float = 1.0) -> None:
        super().__init__()
        self.now, self.slow, self.num_runs = 0.0, slow, 0

    def run(self, chunks):
        prompts = [chunk for chunk in chunks if not chunk.is_decode]
        decodes = [chunk for chunk in chunks if chunk.is_decode]
        shape = BatchShape(
            sum(c.length for c in prompts),
            sum(c.length * (c.start + c.length) for c in prompts),
            len(decodes),
            sum(c.start for c in decodes),
        )
        self.now += self.slow * sum(c * x for c, x in zip(CPU, features(shape), strict=True))
        self.num_runs += 1
        return super().run(chunks)


def test_it_takes_seconds_and_predicts_what_it_did_not_see():
    machine = Machine()
    model = calibrate(machine, BOUNDS, 3.0, lambda: machine.now)
    assert machine.now < 3.3
    rng = random.Random(5)
    for _ in range(50):
        shape = random_plan(rng, BOUNDS).shape
        before = machine.now
        expected = sum(c * x for c, x in zip(CPU, features(shape), strict=True))
        assert model.step_s(shape) == pytest.approx(expected, rel=0.3)
        assert machine.now == before


def test_on_a_slow_machine_it_leaves_out_what_takes_long():
    machine = Machine(slow=5.0)
    model = calibrate(machine, BOUNDS, 3.0, lambda: machine.now)
    assert machine.now < 6.0 and machine.num_runs > 3
    assert model.step_s(BatchShape(0, 0, 4, 1000)) == pytest.approx(0.0825, rel=0.2)


@pytest.mark.parametrize("bounds", [Bounds(5, 1, 4, 1, 4, 10), Bounds(4, 16, 50, 2, 32, 100)])
def test_it_stays_within_small_pools_and_vocabularies(bounds):
    class Careful(FakeRunner):
        def run(self, chunks):
            for seq, start, length in chunks:
                assert start + length <= bounds.max_context
                assert start + length <= len(seq.pages) * bounds.page_size
                assert max(seq.pages) < bounds.num_pages
                assert max(seq.tokens(start, start + length)) < bounds.vocab_size
            return super().run(chunks)

    calibrate(Careful(), bounds, 0.2)


def test_what_was_measured_once_is_not_measured_again(tmp_path):
    first, second = Machine(), Machine()
    known = known_latency(first, BOUNDS, tmp_path, "this machine")
    again = known_latency(second, BOUNDS, tmp_path, "this machine")
    assert first.num_runs and not second.num_runs
    shape = BatchShape(64, 6400, 8, 4000)
    assert again.step_s(shape) == pytest.approx(known.step_s(shape))
    known_latency(second, BOUNDS, tmp_path, "another one")
    assert second.num_runs


def test_a_broken_file_is_measured_over(tmp_path):
    known_latency(Machine(), BOUNDS, tmp_path, "key")
    [path] = tmp_path.iterdir()
    for text in ("{", "[]", json.dumps({"coefficients": [1]})):
        path.write_text(text)
        machine = Machine()
        known_latency(machine, BOUNDS, tmp_path, "key")
        assert machine.num_runs
