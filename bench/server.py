"""A server for one benchmark: `evenflow serve` in a process of its own, on free ports."""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Start a server with these `evenflow serve` flags; the URL of its HTTP door.

    Raises RuntimeError with the end of its log when it does not come up. Whatever it started
    ends with it."""
    http_port = free_port()
    evenflow = Path(sys.executable).with_name("evenflow")  # of this virtual environment
    command = [str(evenflow), "serve", "--http-port", str(http_port)]
    command += ["--grpc-port", str(free_port()), *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{http_port}"
            _wait_until_ready(url, process)
            yield url
        except TimeoutError as error:
            log.seek(0)
            raise RuntimeError(f"the server did not start:\n{log.read()[-3000:]}") from error
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(url)
