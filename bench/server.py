"""A server for one benchmark: a process of its own, started, watched until ready, and ended.

It knows processes, not engines. Everything that a server starts carries a mark in its environment,
by which its memory is summed and its leftovers are found.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
LOG_TAIL = 3000
MARK = "EVENFLOW_BENCH_SERVER"
EVENFLOW_ENV = {"PYTHONPATH": str(Path(__file__).parents[1])}
NOT_INHERITED = {"OMP_NUM_THREADS"}  # a server knows how many threads it was given


class StartError(RuntimeError):
    """The server did not come up; the message ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    start_up_s: float  # process started to the first answer of its readiness probe
    mark: str
    session: int

    def processes(self) -> list[int]:
        return processes(self.mark, self.session)

    def memory_bytes(self) -> int:
        """Of all its processes now, shared pages counted once."""
        return sum(_memory_bytes(pid) for pid in self.processes())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Start Evenflow with these `evenflow serve` flags; the URL of its HTTP door."""
    port = free_port()
    with running(evenflow_command(port, flags), port, "/ready", env=EVENFLOW_ENV) as server:
        yield server.url


def evenflow_command(port: int, flags: Sequence[str]) -> list[str]:
    """Of the checkout that this file is in, whatever is installed; needs ``EVENFLOW_ENV``."""
    ports = ["--http-port", str(port), "--grpc-port", str(free_port())]
    return [sys.executable, "-c", "from serving.cli import main; main()", "serve", *ports, *flags]


@contextlib.contextmanager
def running(
    command: Sequence[str],
    port: int,
    ready_path: str,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """Run ``command`` until the block ends. Whatever it started ends with it.

    Raises StartError when it ends or is silent before ``ready_path`` answers 200."""
    mark = uuid.uuid4().hex
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    environment = {**inherited, **(env or {}), MARK: mark}
    with tempfile.TemporaryFile("w+") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url + ready_path, process, log, timeout_s)
            yield Server(url, time.monotonic() - started, mark, process.pid)
        finally:
            _stop(process, mark)


def _hear_interrupts() -> None:
    """What runs in the background of a shell ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait_until_ready(
    url: str, process: "subprocess.Popen[bytes]", log: IO[str], timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    log.seek(0)
    raise StartError(f"{url} did not answer:\n{log.read()[-LOG_TAIL:]}")


def _stop(process: "subprocess.Popen[bytes]", mark: str) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (left := processes(mark, process.pid)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def processes(mark: str, session: int) -> list[int]:
    """What belongs to a server: by the mark in the environment, by session, by parent. Each of the
    three alone can be lost (a new title, a new session, a parent that ended)."""
    wanted, parents, found = f"{MARK}={mark}".encode(), dict[int, int](), set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent, _, its_session = _stat(folder)
            if state == "Z":
                continue
            parents[int(folder.name)] = int(parent)
            environment = (folder / "environ").read_bytes().split(b"\0")
            if int(its_session) == session or wanted in environment:
                found.add(int(folder.name))
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return sorted(found)


def _stat(folder: Path) -> list[str]:
    """State, parent, process group and session of a process."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[:4]


def _memory_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
