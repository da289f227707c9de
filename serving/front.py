"""The front door as one object: channels to the workers, the gateway, and a socket each for HTTP
and gRPC.

Plain: a Serve replica, a test or a script holds it on its event loop and tells it who the workers
are. It knows nothing about Ray.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import uvicorn

from serving.api.grpc_server import GrpcServer
from serving.api.openai import build_app
from serving.api.settings import FrontSettings
from serving.channel import ChannelPools
from serving.config import Config
from serving.gateway import Gateway
from serving.tokenizer import Tokenizer
from workers.core.request import SLO

DEMO_NAME = "SmolLM2-135M-Instruct"
BACKLOG = 2048
RETRY_S = 0.2
CLOSE_S = 2  # for answers that are being sent when the server stops


class PortTaken(OSError):
    """Somebody else listens there; the message names the port and the flag to change it."""


class FrontDoor:
    """``start``, ``update`` with the workers as they come and go, ``stop``."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self.pools = ChannelPools(stall_timeout_s=config.stall_timeout_s)
        tokenizer = Tokenizer.load(folder)
        name = served_name(config)
        self.gateway = Gateway(self.pools, tokenizer, model=name, max_queue=config.max_queue)
        settings = FrontSettings(
            model=name,
            max_body_bytes=config.max_body_bytes,
            slo=SLO(config.slo.ttft_s, config.slo.itl_s),
            debug=config.debug,
        )
        self._http = _HttpServer(
            uvicorn.Config(
                build_app(self.gateway, settings),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self._grpc = GrpcServer(self.gateway, settings)
        self._task: asyncio.Task[None] | None = None
        self.http_port = self.grpc_port = 0

    async def start(self, patience_s: float = 0.0) -> None:
        """Listen. PortTaken when a port is not free within ``patience_s``."""
        config = self._config
        sock = await _bind(config.host, config.http_port, patience_s)
        self.http_port = sock.getsockname()[1]
        try:
            self.grpc_port = await self._grpc.start(config.host, config.grpc_port)
        except OSError as error:
            sock.close()
            raise PortTaken(taken(config.host, config.grpc_port, "grpc")) from error
        self._task = asyncio.create_task(self._http.serve(sockets=[sock]), name="http server")
        while not self._http.started and not self._task.done():
            await asyncio.sleep(0.01)

    def update(self, addresses: Mapping[str, str]) -> None:
        """These are the workers now: id to address. On the event loop."""
        self.pools.update(addresses)

    @property
    def is_serving(self) -> bool:
        return self._task is not None and not self._task.done()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let the running ones finish within ``drain_s``, close."""
        await self.gateway.drain(drain_s)
        await self._grpc.stop()
        self._http.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self.pools.close()


class _HttpServer(uvicorn.Server):
    """Leaves signals to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def served_name(config: Config) -> str:
    """What clients call the model."""
    if config.served_model_name:
        return config.served_model_name
    if not config.model:
        return DEMO_NAME
    path = Path(config.model).expanduser()
    if path.exists():
        return path.stem if path.suffix == ".gguf" else path.resolve().name
    return config.model


def taken(host: str, port: int, kind: str) -> str:
    """The one line for a port in use; ``kind`` is http or grpc."""
    return f"{host}:{port} is in use: stop what listens there, or choose another --{kind}-port"


async def _bind(host: str, port: int, patience_s: float) -> socket.socket:
    deadline = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            return listening_socket(host, port)
        except OSError as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise PortTaken(taken(host, port, "http")) from error
            await asyncio.sleep(RETRY_S)


def listening_socket(host: str, port: int) -> socket.socket:
    """OSError when the address is not ours to have."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
