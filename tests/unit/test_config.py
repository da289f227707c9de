"""One file, one tree, checked at load with the key in the message."""

from pathlib import Path

import pytest

from serving.config import Config, ConfigError, load_config, seconds


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "evenflow.yaml"
    path.write_text(text)
    return path


def test_defaults_fit_a_two_core_machine() -> None:
    config = load_config()
    assert (config.mixed, config.prefill, config.decode) == (1, 1, 0)
    assert config.host == "127.0.0.1" and (config.http_port, config.grpc_port) == (8000, 9000)
    assert (config.slo.ttft_s, config.slo.itl_s) == (2.0, 0.1)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "mixed: 2\npolicy: static\nslo: {ttft: 3s, itl: 50ms}\nlease_s: 10\n")
    config = load_config(path, {"mixed": 3, "prefill": None, "slo.itl": "80ms"})
    assert config.mixed == 3 and config.prefill == 1 and config.policy == "static"
    assert config.slo.ttft_s == 3.0 and config.slo.itl_s == pytest.approx(0.08)
    assert config.lease_s == 10.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 4", "max_num_seq: no such key; did you mean max_num_seqs?"),
        ("slo: {ttfft: 1s}", "slo.ttfft: no such key; did you mean slo.ttft?"),
        ("policy: fastest", "policy: 'fastest' is not one of chunked, splitfuse"),
        ("mixed: two", "mixed: 'two' is not of type int"),
        ("mixed: true", "mixed: True is not of type int"),
        ("max_num_seqs: 0", "max_num_seqs: 0 is not between 1 and"),
        ("http_port: 70000", "http_port: 70000 is not between"),
        ("http_port: 9000", "grpc_port: 9000 is the HTTP port"),
        ("{mixed: 0, prefill: 0}", "at least one worker"),
        ("slo: {itl: fast}", "slo.itl: 'fast' is not a duration"),
        ("slo: 3", "slo: 3 is not a mapping"),
        ("state: redis", "state: 'redis' is neither memory nor redis://"),
        ("ray: nonsense", "ray: 'nonsense' is neither auto, local nor host:port"),
        ("- 1\n- 2", "a mapping of keys to values is expected"),
        ("a: [", "config file"),
    ],
)
def test_a_bad_setting_is_refused_by_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == Config()


@pytest.mark.parametrize(
    ("text", "expected"), [("2s", 2.0), ("100ms", 0.1), ("1.5m", 90.0), (3, 3.0), (0.5, 0.5)]
)
def test_durations_are_read_with_their_unit(text: str | float, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "fast", "-1s", "1 day", True])
def test_what_is_no_duration_is_refused(text: str | bool) -> None:
    with pytest.raises(ConfigError):
        seconds(text)
