"""A deployment as the command line runs it: checked, started, watched until ready, and ended.

It keeps Ray at arm's length (``serving.deployments.launch`` is imported when it is needed), and
draws nothing: progress goes to whoever asked.
"""

import dataclasses
import errno
import http.client
import json
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from serving.config import Config

if TYPE_CHECKING:
    from serving.deployments.launch import Launch

READY_TIMEOUT_S = 600.0  # loading a large model takes its time
POLL_S = 0.3
WATCH_S = 2.0
CALL_TIMEOUT_S = 5.0

Say = Callable[[str], None]


class ServiceError(Exception):
    """It cannot go on; the message is one line that says what to do."""


class Stopped(BaseException):
    """Somebody asked this process to end. No error, so that nobody catches it as one."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    @property
    def may_drain(self) -> bool:
        """SIGTERM leaves time for running requests; a person at the keyboard wants it to end."""
        return self.signum == signal.SIGTERM


class Service:
    """``with Service(config, say) as service`` leaves nothing running, however it ends.

    Inside the block SIGINT and SIGTERM raise ``Stopped`` in the main thread.
    """

    def __init__(self, config: Config, say: Say) -> None:
        check_ports(config)
        self.config = with_ports(config)
        self._say = say
        self._launch: Launch | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Service":
        try:
            self._catch_signals()
            self._start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._stop(drain=isinstance(error, Stopped) and error.may_drain)
        finally:
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.config.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{self._host}:{self.config.grpc_port}"

    def status(self) -> dict[str, Any]:
        return fetch_status(self.url)

    def watch(self) -> None:
        """Return never: ``Stopped`` ends it, or ServiceError when the deployment is gone."""
        from serving.deployments.launch import LaunchError

        assert self._launch is not None, "watch only what was started"
        while True:
            time.sleep(WATCH_S)
            try:
                self._launch.raise_if_failed()
            except LaunchError as error:
                raise ServiceError(str(error)) from None

    @property
    def _host(self) -> str:
        return "127.0.0.1" if self.config.host in ("0.0.0.0", "") else self.config.host

    def _start(self) -> None:
        self._say("loading Ray")
        from serving.deployments.launch import Launch, LaunchError, check_model

        try:
            self._say("looking at the model")
            check_model(self.config)
            self._launch = Launch(self.config, self._say)
            self._launch.start()
            self._catch_signals()  # Ray has installed a handler of its own
            self._wait_ready(self._launch)
        except LaunchError as error:
            raise ServiceError(str(error)) from None

    def _wait_ready(self, launch: "Launch") -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        wanted = self.config.num_workers
        self._say(f"starting {wanted} workers and loading the model")
        while time.monotonic() < deadline:
            launch.raise_if_failed()
            try:
                present = len(self.status()["workers"])
            except ServiceError:
                present = 0
            if present == wanted:
                return
            if present:
                self._say(f"loading the model: {present} of {wanted} workers are ready")
            time.sleep(POLL_S)
        raise ServiceError(f"not ready within {READY_TIMEOUT_S:.0f} s; Ray's logs: /tmp/ray")

    def _stop(self, drain: bool) -> None:
        if self._launch is None:
            return
        launch, self._launch = self._launch, None
        self._say("finishing running requests" if drain else "stopping")
        try:
            launch.stop(drain)
        except Stopped:  # asked twice
            launch.stop(drain=False)

    def _catch_signals(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            handler = signal.signal(signum, _raise_stopped)
            self._handlers.setdefault(signum, handler)


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    raise Stopped(signum)


def check_ports(config: Config) -> None:
    """ServiceError when a port that is asked for is not free."""
    try_port(config.host, config.http_port, "http")
    try_port(config.host, config.grpc_port, "grpc")


def with_ports(config: Config) -> Config:
    """The configuration with a free port in place of each 0."""
    changes: dict[str, Any] = {}
    for key in ("http_port", "grpc_port"):
        if getattr(config, key) == 0:
            changes[key] = try_port(config.host, 0, key[:4])
    return dataclasses.replace(config, **changes) if changes else config


def try_port(host: str, port: int, kind: str) -> int:
    """The port, or a free one for 0; ``kind`` is http or grpc. ServiceError when it is taken."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen()
            return int(sock.getsockname()[1])
    except OSError as error:
        what = "is in use" if error.errno == errno.EADDRINUSE else f"fails ({error.strerror})"
        raise ServiceError(
            f"{host}:{port} {what}: stop what listens there, or choose another --{kind}-port"
        ) from None


def fetch_status(url: str) -> dict[str, Any]:
    """What ``/v1/evenflow/status`` says. ServiceError when nobody answers there."""
    scheme, _, rest = url.rstrip("/").partition("://")
    netloc = rest.split("/")[0]
    if not netloc or scheme not in ("http", "https"):
        raise ServiceError(f"{url!r} is not an address such as http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(netloc, timeout=CALL_TIMEOUT_S)
        connection.request("GET", "/v1/evenflow/status")
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ServiceError(
            f"no Evenflow answers at {url} ({reason}): start one with `evenflow serve`, or name "
            "another with --url"
        ) from None
    try:
        status: dict[str, Any] = json.loads(body)
        status["workers"]
    except (ValueError, KeyError, TypeError):
        raise ServiceError(f"what answers at {url} is not an Evenflow") from None
    return status
