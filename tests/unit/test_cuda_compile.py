"""The Triton kernels compile for GPUs: what the interpreter does not check, types above all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

CAPABILITIES = ("80", "90")


def test_every_kernel_compiles_for_ampere_and_hopper(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiled_kernels", *CAPABILITIES],
        cwd=Path(__file__).parents[2],
        env={**kept, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 7 * len(CAPABILITIES) and all(line["bytes"] for line in lines)
    assert {line["kernel"] for line in lines if line["mma"]} == {"_attend_split"}
