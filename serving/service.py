"""A deployment as the command line runs it: checked, started, watched until ready, and ended.

It keeps Ray at arm's length (``serving.deployments.launch`` is imported when it is needed), and
draws nothing: progress goes to whoever asked.
"""

import dataclasses
import errno
import http
import http.client
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from serving.config import Config

if TYPE_CHECKING:
    from serving.deployments.launch import Launch

READY_TIMEOUT_S = 600.0  # loading a large model takes its time
POLL_S = 0.3
WATCH_S = 2.0
CALL_TIMEOUT_S = 5.0
KEY_VARIABLE = "EVENFLOW_API_KEY"  # of the command line as a client
CA_VARIABLE = "EVENFLOW_CA"  # a PEM file: whom to trust instead of the system's authorities

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
        scheme = "https" if self.config.tls.is_on else "http"
        return f"{scheme}://{self._host}:{self.config.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{self._host}:{self.config.grpc_port}"

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
            present = self._num_ready(launch)
            if present >= wanted:
                return
            if present:
                self._say(f"loading the model: {present} of {wanted} workers are ready")
            time.sleep(POLL_S)
        raise ServiceError(f"not ready within {READY_TIMEOUT_S:.0f} s; Ray's logs: /tmp/ray")

    def _num_ready(self, launch: "Launch") -> int:
        """Workers that the gateway has. Who has no client's certificate takes Serve's word."""
        if self.config.tls.client_ca:
            return self.config.num_workers if launch.is_running else 0
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE  # this very process's child
        try:
            return int(fetch(self.url, "/ready", trust)["workers"])
        except ServiceError:
            return 0

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


def key_header() -> dict[str, str]:
    """The key of whoever uses the command line, for a server that asks for one."""
    key = os.environ.get(KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}


def fetch_status(url: str) -> dict[str, Any]:
    """What ``/v1/evenflow/status`` says. ServiceError when nobody answers there."""
    return fetch(url, "/v1/evenflow/status", _trust())


def fetch_explanation(url: str, request_id: str) -> dict[str, Any]:
    """Where a recent request ran and why. ServiceError when there is no such request."""
    path = f"/v1/evenflow/requests/{quote(request_id, '')}"
    status, answer = _exchange(url, "GET", path, _trust())
    try:
        body: dict[str, Any] = json.loads(answer)
        if status != http.HTTPStatus.OK:
            raise ServiceError(str(body["error"]["message"]))
        body["request_id"]
    except (ValueError, KeyError, TypeError):
        raise ServiceError(f"what answers at {url} is not an Evenflow") from None
    return body


def set_role(url: str, worker: str, role: str) -> None:
    """ServiceError says why not."""
    _ask(url, f"/v1/evenflow/workers/{quote(worker, '')}/role", {"role": role})


def drain_worker(url: str, worker: str) -> None:
    """ServiceError says why not."""
    _ask(url, f"/v1/evenflow/workers/{quote(worker, '')}/drain", {})


def scale_pool(url: str, pool: str, workers: int) -> None:
    """ServiceError says why not."""
    _ask(url, f"/v1/evenflow/pools/{quote(pool, '')}/scale", {"workers": workers})


def _ask(url: str, path: str, body: Mapping[str, object]) -> None:
    status, answer = _exchange(url, "POST", path, _trust(), json.dumps(body))
    if status != http.HTTPStatus.OK:
        try:
            message = json.loads(answer)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"what answers at {url} is not an Evenflow"
        raise ServiceError(str(message))


def _trust() -> ssl.SSLContext | None:
    trust = None
    if authority := os.environ.get(CA_VARIABLE):
        try:
            trust = ssl.create_default_context(cafile=authority)
        except OSError as error:
            raise ServiceError(f"{CA_VARIABLE}: {authority}: {error.strerror}") from None
    return trust


def fetch(url: str, path: str, trust: ssl.SSLContext | None = None) -> dict[str, Any]:
    """A JSON object with ``workers``. ServiceError when nobody answers there."""
    _, body = _exchange(url, "GET", path, trust)
    try:
        status: dict[str, Any] = json.loads(body)
        status["workers"]
    except (ValueError, KeyError, TypeError):
        raise ServiceError(f"what answers at {url} is not an Evenflow") from None
    return status


def _exchange(
    url: str, method: str, path: str, trust: ssl.SSLContext | None, body: str | None = None
) -> tuple[int, bytes]:
    """Status and body of the answer. ServiceError when nobody answers, or wants a key."""
    scheme, _, rest = url.rstrip("/").partition("://")
    netloc = rest.split("/")[0]
    if not netloc or scheme not in ("http", "https"):
        raise ServiceError(f"{url!r} is not an address such as http://127.0.0.1:8000")
    if scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            netloc, timeout=CALL_TIMEOUT_S, context=trust
        )
    else:
        connection = http.client.HTTPConnection(netloc, timeout=CALL_TIMEOUT_S)
    try:
        connection.request(method, path, body, key_header())
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ServiceError(
            f"no Evenflow answers at {url} ({reason}): start one with `evenflow serve`, or name "
            "another with --url"
        ) from None
    finally:
        connection.close()
    if answer.status == http.HTTPStatus.UNAUTHORIZED:
        raise ServiceError(f"{url} wants an API key: put it into {KEY_VARIABLE}")
    return answer.status, content
