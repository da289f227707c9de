"""``evenflow tune`` measures a real model and says what to write into the configuration."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from bench.tiny import tiny_model
from serving.cli import app
from serving.config import load_config
from serving.console_tune import snippet
from serving.deployments.tune import Check, Step, Tuning


@pytest.fixture
def tuned(tmp_path):
    """A function that tunes T0 with these flags."""
    folder = tiny_model(tmp_path / "t0")

    def run(*flags):
        command = ["tune", "--model", str(folder), "--threads", "1", "--streams", "2"]
        return CliRunner().invoke(app, [*command, "--prompt-tokens", "300", *flags])

    return run


def test_the_largest_budget_that_fits_is_checked_against_the_online_one(tuned):
    result = tuned("--slo-itl", "10s", "--json")
    assert result.exit_code == 0, result.output
    tuning = json.loads(result.stdout)
    assert tuning["best"] == max(step["budget"] for step in tuning["steps"])
    assert [check["budget"] for check in tuning["checks"]] == [tuning["best"], None]
    assert all(check["kept"] == 1 and check["ttft_s"] > 0 for check in tuning["checks"])
    assert tuning["online_tokens"] > 0


def test_a_promise_that_nothing_keeps_is_said(tuned):
    result = tuned("--slo-itl", "0.01ms")
    assert result.exit_code == 0, result.output
    assert "No fixed budget fits" in result.stdout and "online" in result.stdout


def test_it_draws_a_picture(tuned, tmp_path):
    pytest.importorskip("matplotlib")
    result = tuned("--slo-itl", "10s", "--plot", str(tmp_path / "tune.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    assert "max_num_batched_tokens" in result.stdout


def test_a_model_that_is_not_there_ends_in_one_line(tmp_path):
    result = CliRunner().invoke(app, ["tune", "--model", str(tmp_path / "nothing")])
    assert result.exit_code == 1 and "Traceback" not in result.output


def test_the_snippet_is_a_configuration(tmp_path):
    steps = (Step(64, 0.08, 0.081, True),)
    tuning = Tuning(0.1, 0.02, steps, 64, 50, (Check(64, 0.08, 0.09, 1.0, 5.0),))
    path = tmp_path / "evenflow.yaml"
    path.write_text(snippet(tuning))
    assert yaml.safe_load(path.read_text())["max_num_batched_tokens"] == 64
    assert load_config(path).slo.itl_s == pytest.approx(0.1)
