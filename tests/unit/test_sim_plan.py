"""``evenflow plan`` answers from virtual time with what serve accepts."""

import json
import random
from pathlib import Path

import pytest

from bench import plan
from bench.sim import catalogue
from bench.sim.planner import Plan
from serving.config import load_config

HEAVY = {"fixed_s": 0.05, "prefill_token_s": 1e-3, "attention_s": 1e-8, "decode_s": 1e-3}


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    rng = random.Random(0)
    rows = [f"{rng.randint(50, 800)},{rng.randint(5, 40)}" for _ in range(40)]
    path = tmp_path / "lengths.csv"
    path.write_text("\n".join(["prompt,output", *rows]) + "\n")
    return path


@pytest.fixture
def flags(lengths: Path, tmp_path: Path) -> list[str]:
    coefficients = tmp_path / "mine.json"
    coefficients.write_text(json.dumps(HEAVY))
    out = ["--config-out", str(tmp_path / "plan.yaml"), "--plot-out", str(tmp_path / "plan.png")]
    promise = ["--slo-ttft", "3s", "--slo-itl", "400ms"]
    trace = ["--trace", str(lengths), "--rate", "0.5", "--gpus", "2"]
    return [*trace, *promise, "--latency", str(coefficients), *out]


def test_a_plan_is_printed_drawn_and_accepted_by_serve(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(flags) == 0
    told = capfd.readouterr().out
    for word in ("mixed", "disaggregated", "auto", "capacity", "smallest", "GPU-s per 1k tokens"):
        assert word in told
    config = load_config(tmp_path / "plan.yaml")
    assert config.num_workers == 2 and config.slo.ttft_s == 3.0 and config.slo.itl_s == 0.4
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_the_same_seed_gives_the_same_advice(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for _ in range(2):
        assert plan.main([*flags, "--json"]) == 0
        answers.append(json.loads(capfd.readouterr().out))
    assert answers[0] == answers[1]
    best = answers[0]["best"]
    assert best["capacity"] == max(c["capacity"] for c in answers[0]["by_mode"].values())


@pytest.mark.parametrize(
    "more, words",
    [
        (["--model", "gpt-9"], "is not among the models: llama-3.1-8b"),
        (["--gpu", "tpu"], "is not among the gpus"),
        (["--trace", "nowhere.csv"], "nowhere.csv: no such file"),
        (["--slo-itl", "fast"], "--slo-itl: 'fast' is not a duration"),
        (["--model", "llama-3.1-70b"], "do not hold llama-3.1-70b"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    flags: list[str], more: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*flags, *more]) != 0
    told = capfd.readouterr().err
    assert words in " ".join(told.split())


def test_a_plan_keeps_its_kind_when_it_shrinks() -> None:
    split = Plan("auto", 2, 0, 8, 4, 512)
    assert (split.num_workers, split.num_gpus) == (12, 24)
    smaller = [split.with_workers(n) for n in (2, 3, 6)]
    assert [(p.prefill, p.decode) for p in smaller] == [(1, 1), (2, 1), (4, 2)]
    assert Plan("mixed", 1, 8, 0, 0, 512).with_workers(3).mixed == 3


def test_more_memory_holds_more_pages_and_weights_need_room() -> None:
    model = catalogue.model("llama-3.1-70b")
    h100, h200 = catalogue.gpu("h100"), catalogue.gpu("h200")
    assert catalogue.num_pages(model, h100, 1, 16) == 0
    pages = [catalogue.num_pages(model, h100, tp, 16) for tp in (4, 8)]
    assert 0 < 2 * pages[0] < pages[1] and catalogue.num_pages(model, h200, 4, 16) > pages[0]
