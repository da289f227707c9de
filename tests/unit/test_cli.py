"""The command line: flags in, one line and a code out."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from serving.cli import app
from serving.config import load_config
from serving.service import Service, ServiceError, with_ports

LOAD = {
    "waiting_seqs": 1,
    "running_seqs": 2,
    "queued_tokens": 30,
    "free_pages": 90,
    "num_pages": 100,
    "leased_pages": 4,
    "step_s": 0.05,
}
STATUS = {
    "model": "tiny",
    "num_calls": 3,
    "ready": True,
    "workers": [{"id": "mixed-0", "role": "mixed", "load": LOAD}],
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def server() -> Iterator[str]:
    """Answers every request with STATUS."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(STATUS).encode())

        def do_POST(self) -> None:
            """Knows one worker."""
            length = int(self.headers["content-length"] or 0)
            body = json.loads(self.rfile.read(length))
            known = self.path.split("/")[-2] == "mixed-0" and body.get("role") != "both"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": "no such thing"}}).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


@pytest.mark.parametrize("command", ["serve", "demo", "status", "doctor"])
def test_every_command_explains_itself(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0 and "--help" in result.output


def test_the_command_answers_without_ray_and_torch() -> None:
    probe = "import sys, serving.cli; print(sorted({'ray', 'torch', 'grpc'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_status_shows_the_load_of_each_worker(server: str) -> None:
    table = run("status", "--url", server)
    assert table.exit_code == 0
    assert "mixed-0" in table.output and "6/100" in table.output  # leased pages are not used ones
    assert json.loads(run("status", "--url", server, "--json").output) == STATUS


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1", "http://"])
def test_status_of_nobody_is_one_line(url: str) -> None:
    result = run("status", "--url", url)
    assert result.exit_code == 1
    assert result.stderr.startswith("evenflow: ") and result.stderr.count("\n") == 1


def test_what_is_no_evenflow_is_named(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(STATUS, "workers")
    result = run("status", "--url", server)
    assert result.exit_code == 1 and "is not an Evenflow" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "fastest"), "policy: 'fastest' is not one of chunked"),
        (("--mixed", "0", "--prefill", "0"), "at least one worker"),
        (("--slo-itl", "soon"), "slo.itl: 'soon' is not a duration"),
        (("--max-num-seqs", "0"), "max_num_seqs: 0 is not between"),
        (("--state", "redis"), "state: 'redis' is neither"),
        (("--config", "nowhere.yaml"), "config file nowhere.yaml: No such file"),
    ],
)
def test_serve_refuses_a_bad_setting_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run("serve", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_serve_refuses_a_flag_of_the_wrong_type() -> None:
    assert run("serve", "--mixed", "two").exit_code == 2


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_port_in_use_is_an_error_before_anything_starts(kind: str, taken: int) -> None:
    other = "grpc" if kind == "http" else "http"
    result = run("serve", f"--{kind}-port", str(taken), f"--{other}-port", "0")
    assert result.exit_code == 1
    assert result.stderr.strip() == (
        f"evenflow: 127.0.0.1:{taken} is in use: stop what listens there, or choose another "
        f"--{kind}-port"
    )


def test_serve_refuses_an_unknown_model_before_it_starts_ray(tmp_path: Path) -> None:
    ports = ("--http-port", "0", "--grpc-port", "0")
    result = run("serve", "--model", str(tmp_path), *ports)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"evenflow: {tmp_path} has no config.json")
    assert "Ray ..." in result.stderr and "starting Ray" not in result.stderr


def test_port_zero_becomes_a_free_port() -> None:
    config = with_ports(load_config(None, {"http_port": 0, "grpc_port": 0}))
    assert 0 < config.http_port != config.grpc_port > 0


def test_a_service_that_cannot_start_restores_the_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    config = load_config(None, {"model": str(tmp_path), "http_port": 0, "grpc_port": 0})
    with pytest.raises(ServiceError), Service(config, lambda stage: None):
        raise AssertionError("it started")
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_demo_needs_somebody_to_talk_to() -> None:
    result = run("demo", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "the server does not answer" in result.stderr and result.stderr.count("\n") == 1


def test_roles_and_drains(server: str) -> None:
    assert "is decode now" in run("role", "mixed-0", "decode", "--url", server).output
    assert "takes nothing new" in run("drain", "mixed-0", "--url", server).output
    refused = run("role", "mixed-0", "both", "--url", server)
    assert refused.exit_code == 1 and "no such thing" in refused.output
    assert run("drain", "a/b", "--url", server).exit_code == 1


def test_an_early_interrupt_shows_no_traceback() -> None:
    """Ctrl-C while the command is still being imported."""
    code = "import os, signal, sys\nimport serving.entry\n"
    code += "class Now:\n    def find_spec(self, name, *_):\n"
    code += "        if name == 'serving.cli': os.kill(os.getpid(), signal.SIGINT)\n"
    code += "sys.meta_path.insert(0, Now())\nserving.entry.main()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_cuda_is_refused_before_a_ray_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    from serving.deployments import launch

    started: list[object] = []
    monkeypatch.setattr(launch.ray, "init", lambda **options: started.append(options))
    config = load_config(None, {"device": "cuda", "ray": "local"})
    with pytest.raises(launch.LaunchError, match="sees no CUDA device; use --device cpu"):
        launch.Launch(config, lambda _: None).start()
    assert started == []
