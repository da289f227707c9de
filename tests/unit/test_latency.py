"""The latency model finds a machine's coefficients, follows its moods, ignores its noise."""

import math
import random
import statistics

import pytest

from workers.core.latency import GUESS, LatencyModel, features, fitted, restored
from workers.core.pace import pace_of
from workers.core.plan import BatchShape
from workers.core.policy import Limits

CPU = (0.013, 2e-4, 3e-7, 6e-4, 1.1e-6, 5e-4)


class Machine:
    """Takes what its coefficients say, give or take; some steps far longer."""

    def __init__(self, seed: int = 0, noise: float = 0.04, stalls: float = 0.01) -> None:
        self.rng, self.noise, self.stalls, self.slow = random.Random(seed), noise, stalls, 1.0

    def step_s(self, shape: BatchShape) -> float:
        base = sum(c * x for c, x in zip(CPU, features(shape), strict=True))
        stall = 3.0 if self.rng.random() < self.stalls else 1.0
        return self.slow * stall * base * math.exp(self.rng.gauss(0, self.noise))

    def shape(self, prompts: bool = True) -> BatchShape:
        rng = self.rng
        num = rng.randint(0 if prompts else 1, 32)
        length = rng.randint(1, 512) if prompts and (not num or rng.random() < 0.6) else 0
        context = length * rng.randint(length, 4000)
        return BatchShape(length, context, num, sum(rng.randint(1, 4000) for _ in range(num)))


def teach(model, machine, num_steps, prompts=True):
    """The relative errors of the predictions made on the way."""
    errors = []
    for _ in range(num_steps):
        shape = machine.shape(prompts)
        took = machine.step_s(shape)
        errors.append(abs(model.step_s(shape) / took - 1))
        model.observe(shape, took)
    return errors


@pytest.mark.parametrize("seed", range(10))
def test_it_learns_a_machine_from_random_batches(seed):
    errors = teach(LatencyModel(), Machine(seed), 400)[150:]
    assert statistics.median(errors) < 0.08
    assert sorted(errors)[int(0.95 * len(errors))] < 0.25


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_it_follows_a_sudden_change_of_speed_within_a_hundred_steps(factor):
    model, machine = LatencyModel(), Machine(1)
    teach(model, machine, 300)
    machine.slow = factor
    assert statistics.median(teach(model, machine, 5)) > 0.3
    teach(model, machine, 95)
    assert statistics.median(teach(model, machine, 25)) < 0.15


def test_an_hour_of_decodes_does_not_erase_what_prompts_cost():
    model, machine = LatencyModel(), Machine(2)
    teach(model, machine, 300)
    teach(model, machine, 5000, prompts=False)
    assert statistics.median(teach(model, machine, 25)) < 0.12


def test_rare_stalls_do_not_move_the_coefficients():
    model, machine = LatencyModel(), Machine(3, noise=0.02, stalls=0.0)
    teach(model, machine, 300)
    shape = BatchShape(64, 64 * 1000, 8, 4000)
    before = model.step_s(shape)
    for _ in range(5):
        model.observe(shape, 20 * before)
        teach(model, machine, 20)
    assert abs(model.step_s(shape) / before - 1) < 0.1


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_few_steps_exceed_the_confident_prediction(noise):
    model, machine = LatencyModel(), Machine(4, noise=noise, stalls=0.002)
    teach(model, machine, 500)
    late = 0
    for _ in range(4000):
        shape = machine.shape()
        took = machine.step_s(shape)
        late += took > model.upper_s(shape)
        model.observe(shape, took)
    assert late / 4000 < 0.01


def test_the_first_steps_of_a_process_are_not_believed():
    model = LatencyModel(CPU)
    shape = BatchShape(64, 64 * 64, 0, 0)
    before = model.step_s(shape)
    for _ in range(2):
        model.observe(shape, 100.0)
    assert model.step_s(shape) == before and model.margin(True) == LatencyModel(CPU).margin(True)


def test_its_errors_are_reported():
    model, machine = LatencyModel(CPU), Machine(5, noise=0.01, stalls=0.0)
    teach(model, machine, 200)
    assert model.error < 0.03 and abs(model.ratio - 1) < 0.03
    machine.slow = 1.5
    teach(model, machine, 3)
    assert model.error > 0.02 and model.ratio < 1


def test_a_feature_that_only_fits_noise_never_makes_work_pay():
    model, rng = LatencyModel(), random.Random(6)
    for _ in range(200):
        shape = BatchShape(0, 0, rng.randint(1, 4), rng.randint(100, 400))
        model.observe(shape, 0.02 * math.exp(rng.gauss(0, 0.2)))
    assert min(model.coefficients) >= 0
    more = BatchShape(64, 64 * 64, 4, 400)
    assert model.step_s(more) >= model.step_s(BatchShape(0, 0, 4, 400))


@pytest.mark.parametrize("times", [0.02, 1.0, 10.0])
def test_how_far_off_the_first_guess_was_is_no_noise(times):
    """A GPU is a hundred times as fast as the guess: its first steps shall be no shorter for it."""
    machine = Machine(9, noise=0.01, stalls=0.0)
    machine.slow = times
    samples = [(shape, machine.step_s(shape)) for shape in (machine.shape() for _ in range(60))]
    model = fitted(samples)
    assert model.is_measured and model.margin(True) < 1.15 and model.margin(False) < 1.15
    errors = [abs(model.step_s(shape) / seconds - 1) for shape, seconds in samples]
    assert statistics.median(errors) < 0.02


def test_without_a_sample_the_guess_stays():
    assert fitted([]).coefficients == pytest.approx(GUESS)


def test_a_snapshot_predicts_the_same():
    model, machine = LatencyModel(), Machine(7)
    teach(model, machine, 300)
    model.settle()
    again = restored(model.snapshot())
    shape = machine.shape()
    assert again.step_s(shape) == pytest.approx(model.step_s(shape))


@pytest.mark.parametrize(
    "snapshot",
    [{}, {"coefficients": [1.0], "spread": 0.1}, {"coefficients": list(GUESS), "spread": None}],
)
def test_a_foreign_snapshot_is_refused(snapshot):
    with pytest.raises(ValueError, match="not the coefficients"):
        restored(snapshot)


def test_transfers_are_learned_per_pair():
    model = LatencyModel()
    for num_bytes in (1 << 20, 8 << 20, 64 << 20) * 10:
        model.observe_transfer(num_bytes, 0.001 + num_bytes / 2.5e9, "near")
        model.observe_transfer(num_bytes, 0.02 + num_bytes / 0.5e9, "far")
    assert model.transfer_s(32 << 20, "near") == pytest.approx(0.001 + (32 << 20) / 2.5e9, rel=0.1)
    assert model.transfer_s(32 << 20, "far") == pytest.approx(0.02 + (32 << 20) / 0.5e9, rel=0.1)
    new = model.transfer_s(32 << 20, "new")
    assert model.transfer_s(32 << 20, "near") < new < model.transfer_s(32 << 20, "far")


def test_others_are_told_what_the_model_predicts():
    model, machine = LatencyModel(), Machine(8)
    assert not pace_of(model, Limits(), 4096).is_measured, "a guess is called one"
    teach(model, machine, 300)
    model.observe_transfer(1 << 20, 0.01, "near")
    pace = pace_of(model, Limits(max_tokens=77, online=True), 4096)
    for shape in (machine.shape(), BatchShape(0, 0, 3, 300)):
        assert pace.step_s(shape) == pytest.approx(model.step_s(shape))
        assert pace.step_s(shape) * pace.margin(shape.prefill_tokens > 0) == pytest.approx(
            model.upper_s(shape)
        )
    assert pace.prompt_s(16, 400) == pytest.approx(model.prompt_s(16, 400))
    assert pace.transfer_s(256) == pytest.approx(model.transfer_s(1 << 20, "near"))
    assert (pace.max_tokens, pace.is_online, pace.is_measured) == (77, True, True)
