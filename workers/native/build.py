"""Compiles the kernels when they are first needed, once per machine and instruction set.

The result is kept in the cache under a key of everything it depends on. Whoever compiles does so
under a name of its own and renames at the end, so processes that start together do no harm.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).parent
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=fast", "-fopenmp"]
FLAGS += ["-shared", "-fPIC", "-fvisibility=hidden"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"]
ISAS = {  # the best first: what the CPU must have (torch's names), and the compiler's flags
    "avx512_bf16": (["avx512_bf16", "avx512_bw", "avx512_vl"], [*AVX512, "-mavx512bf16"]),
    "avx512": (["avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"], AVX512),
    "avx2": (["avx2", "fma3"], ["-mavx2", "-mfma"]),
    "baseline": ([], []),
}
COMPILE_TIMEOUT_S = 300.0


class BuildError(Exception):
    """No kernels here. The message is one line that says why."""


def best_isa() -> str:
    """The first instruction set in ISAS that this CPU has."""
    return next(isa for isa in ISAS if has(isa))


def has(isa: str) -> bool:
    """Whether this CPU runs what is compiled for an instruction set."""
    capabilities = torch.cpu.get_capabilities()
    return all(capabilities.get(need) for need in ISAS[isa][0])


def build(isa: str, extra_flags: Sequence[str] = ()) -> Path:
    """The shared library for an instruction set; BuildError when it cannot be made."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise BuildError("there is no C++ compiler (c++, or what CXX names)")
    flags = [*FLAGS, *ISAS[isa][1], *extra_flags]
    folder = cache_dir() / "native"
    library = folder / f"{isa}-{_key(compiler, flags)}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            made = Path(partial) / library.name
            _run([compiler, *flags, str(SOURCE / "kernels.cpp"), "-o", str(made)])
            made.rename(library)
    except OSError as error:
        raise BuildError(f"cannot write to the cache: {error}") from None
    return library


def open_library(isa: str, extra_flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile if needed, and load. torch is imported by then, and the kernels share its threads."""
    path = build(isa, extra_flags)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load {path.name}: {error}") from None


def cache_dir() -> Path:
    if chosen := os.environ.get("EVENFLOW_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "evenflow"


def _key(compiler: str, flags: list[str]) -> str:
    digest = hashlib.sha256(f"{_version(compiler)}\n{flags}".encode())
    for path in sorted([*SOURCE.glob("*.h"), *SOURCE.glob("*.cpp")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise BuildError(f"{command[0]} failed: {lines[0]}")
    return done.stdout
