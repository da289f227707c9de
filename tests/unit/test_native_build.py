"""Kernels are compiled once, by whoever comes first; without a compiler torch computes."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.greedy import generate, sequence
from workers.models.llama import Llama
from workers.native import build
from workers.native.library import kernels
from workers.runner import load_runner

QUICK = ["-O0"]
OPEN = "from workers.native.library import Kernels; print(Kernels('baseline', ['-O0']).isa)"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one; what was found out about the machine before does not count."""
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path))
    kernels.cache_clear()
    yield tmp_path / "native"
    kernels.cache_clear()


def need_compiler() -> None:
    try:
        build.build("baseline", QUICK)
    except build.BuildError as error:
        pytest.skip(f"no native kernels: {error}")


def test_the_second_start_compiles_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_compiler()
    (library,) = cache.iterdir()
    made_at = library.stat().st_mtime_ns
    assert build.build("baseline", QUICK) == library
    assert [(path, path.stat().st_mtime_ns) for path in cache.iterdir()] == [(library, made_at)]


def test_processes_that_start_together_do_no_harm(cache: Path) -> None:
    need_compiler()
    for library in cache.iterdir():
        library.unlink()
    starts = [
        subprocess.Popen([sys.executable, "-c", OPEN], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [start.communicate(timeout=300)[0].strip() for start in starts] == ["baseline"] * 2
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler", "there is no C\\+\\+ compiler"), ("false", "failed")],
)
def test_without_a_compiler_torch_computes_and_one_line_says_so(
    compiler: str,
    reason: str,
    cache: Path,
    t0_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.BuildError, match=reason):
        build.build("baseline")
    with caplog.at_level(logging.WARNING):
        runners = [load_runner(t0_folder, "float32", num_pages=8) for _ in range(2)]
    assert [type(runner.model) for runner in runners] == [Llama] * 2
    (line,) = caplog.messages
    assert line.startswith("compute: torch, because the native kernels are not there")
    seq = sequence("a", range(20), range(4), max_tokens=5)
    generate(runners[0], [seq])
    assert len(seq.output) == 5
