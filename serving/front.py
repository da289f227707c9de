"""The front door as one object: channels to the workers, the gateway, and a socket each for HTTP
and gRPC.

Plain: a Serve replica, a test or a script holds it on its event loop and tells it who the workers
are. It knows nothing about Ray.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from serving.api.grpc_server import GrpcServer, ServerTls, server_tls
from serving.api.openai import build_app
from serving.api.settings import FrontSettings
from serving.auth import Keyring, load_keys
from serving.certificates import check_pem, read_cluster_tls
from serving.channel.gateway import ChannelPools, over_grpc
from serving.config import ROLES, Config, ScalingConfig, TlsConfig, is_loopback, served_name
from serving.core.scaling import ScaleRules
from serving.gateway import Gateway
from serving.http_server import HttpServer
from serving.recording import Recorder
from serving.scaler import PoolRange, Replicas, Scaler
from serving.state import MemoryStore, StateStore
from serving.tokenizer import Tokenizer
from serving.tracing import over_http
from workers.core.request import SLO
from workers.grammar import Grammars

T = TypeVar("T")

logger = logging.getLogger(__name__)

BACKLOG = 2048
RETRY_S = 0.2


class PortTaken(OSError):
    """Somebody else listens there; the message names the port."""


class FrontDoor:
    """``start``, ``update`` with the workers as they come and go, ``stop``."""

    def __init__(self, config: Config, folder: Path, token: str = "") -> None:
        self._config = config
        connect = partial(over_grpc, tls=read_cluster_tls(config.cluster_tls))
        self.pools = ChannelPools(
            stall_timeout_s=config.stall_timeout_s, token=token, connect=connect
        )
        tokenizer = Tokenizer.load(folder)
        name = served_name(config)
        self._store = _store(config, name)
        self._recorder = Recorder(Path(config.record)) if config.record else None
        self._tracing = over_http(config.tracing) if config.tracing else None
        self.gateway = Gateway(
            self.pools,
            tokenizer,
            model=name,
            max_queue=config.max_queue,
            early_fetch=config.early_fetch,
            in_time=config.refuse_late,
            store=self._store,
            recorder=self._recorder,
            tracing=self._tracing,
            demand_window_s=config.scaling.window_s,
            secret=token.encode()[:64],
        )
        settings = FrontSettings(
            model=name,
            max_body_bytes=config.max_body_bytes,
            slo=SLO(config.slo.ttft_s, config.slo.itl_s),
            debug=config.debug,
            grammars=Grammars.load(folder, tokenizer.vocab_size, tokenizer.eos_ids),
            keys=load_keys(Path(config.api_keys)) if config.api_keys else Keyring(),
        )
        self._http = HttpServer(build_app(self.gateway, settings), config.tls)
        self._grpc = GrpcServer(self.gateway, settings, _grpc_tls(config.tls))
        self._task: asyncio.Task[None] | None = None
        self._scaling: asyncio.Task[None] | None = None
        self.http_port = self.grpc_port = 0

    async def start(self, patience_s: float = 0.0) -> None:
        """Listen. PortTaken when a port is not free within ``patience_s``."""
        config = self._config
        if not config.is_guarded and not is_loopback(config.host):
            logger.warning(
                "anybody who reaches %s can use this server: insecure is set", config.host
            )
        deadline = time.monotonic() + patience_s
        sock = await _patiently(deadline, lambda: _listen(config.host, config.http_port))
        self.http_port = sock.getsockname()[1]
        try:
            self.grpc_port = await _patiently(
                deadline, lambda: self._grpc.start(config.host, config.grpc_port)
            )
        except OSError:
            sock.close()
            raise
        self._task = asyncio.create_task(self._http.serve(sockets=[sock]), name="http server")
        self.gateway.peers.start(
            host=config.host, http_port=self.http_port, grpc_port=self.grpc_port
        )
        self.gateway.prefix_news.start()
        while not self._http.started and not self._task.done():
            await asyncio.sleep(0.01)

    def update(self, addresses: Mapping[str, str]) -> None:
        """These are the workers now: id to address. On the event loop."""
        self.pools.update(addresses)

    def scale_with(self, replicas: Replicas) -> None:
        """Change roles and numbers of workers by demand from now on, as the configuration says."""
        scaling = self._config.scaling
        ranges: dict[str, PoolRange] = {
            role: PoolRange(role, *scaling.range(role, self._config.count(role)))
            for role in ROLES
            if self._config.count(role)
        }
        rules = scale_rules(scaling, self._config.most_workers)
        scaler = Scaler(self.gateway, replicas, ranges, rules, self._store)
        self.gateway.scaler = scaler
        self._scaling = asyncio.create_task(scaler.run(), name="scaler")

    @property
    def is_serving(self) -> bool:
        return self._task is not None and not self._task.done()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let the running ones finish within ``drain_s``, close."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        await self.gateway.drain(drain_s)
        await self.gateway.prefix_news.stop()
        await self.gateway.peers.stop()
        await self._grpc.stop()
        self._http.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self.pools.close()
        await self._store.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def scale_rules(scaling: ScalingConfig, max_workers: int) -> ScaleRules:
    """What the configuration leaves open follows from its period and its cool-down."""
    period_s, cool_s = scaling.period_s, scaling.cool_down_s
    return ScaleRules(
        max_gpus=float(max_workers),
        period_s=period_s,
        down_cool_s=cool_s,
        settle_s=6 * period_s,
        up_cool_s=2 * period_s,
        flip_cool_s=3 * period_s,
        stable_s=scaling.look_back_s,
        flips=scaling.flips,
    )


def _store(config: Config, name: str) -> StateStore:
    if config.state == "memory":
        return MemoryStore()
    from serving.redis_store import RedisStore  # an extra of this package

    return RedisStore(config.state, name)


def _grpc_tls(tls: TlsConfig) -> ServerTls | None:
    """ConfigError when a file is not what it should be: for both doors, before either opens."""
    if not tls.is_on:
        return None
    check_pem("tls", tls.cert, tls.key, tls.client_ca)
    ca = Path(tls.client_ca) if tls.client_ca else None
    return server_tls(Path(tls.cert), Path(tls.key), ca)


async def _patiently(deadline: float, take: Callable[[], Awaitable[T]]) -> T:
    """What ``take`` returns once the port is free. PortTaken when it is not before ``deadline``."""
    while True:
        try:
            return await take()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise PortTaken(str(error)) from error
            await asyncio.sleep(RETRY_S)


async def _listen(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(f"{host}:{port} cannot be bound: {error.strerror}") from error
    return sock
