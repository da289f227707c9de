"""The kernels touch no memory that is not theirs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workers.native.build import best_isa

ROOT = Path(__file__).parents[2]


def sanitizer() -> str:
    """The address sanitizer's library, which has to be loaded before anything else."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    name = [compiler, "-print-file-name=libasan.so"]
    path = Path(subprocess.run(name, capture_output=True, text=True).stdout.strip())
    if not path.is_absolute():
        pytest.skip("the compiler has no libasan")
    return str(path.resolve())


def test_no_access_out_of_bounds(tmp_path: Path) -> None:
    environment = os.environ | {
        "LD_PRELOAD": sanitizer(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.sanitized", best_isa(), str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.endswith("clean\n"), done.stderr[-3000:]
