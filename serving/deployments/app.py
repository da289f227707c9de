"""The Serve application: one gateway deployment, and one deployment of workers per pool.

Serve places, watches and replaces replicas, and tells everybody who is there. Tokens and pages
never cross a Ray handle: the plain classes inside the replicas talk over their own sockets.
"""

import asyncio
import gc
import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from serving.config import ROLES, Config, ConfigError, Role
from serving.deployments import membership
from serving.deployments.scaling import ServeReplicas
from serving.front import FrontDoor
from workers.weights import resolve

APP = "evenflow"
GATEWAY = "gateway"
ROUTER = "serving.deployments.ray_pools.MembershipRouter"
HEALTH_PERIOD_S = 2.0
START_TIMEOUT_S = 60.0  # for the gateway to take its ports, when a predecessor still holds them


class WorkerReplica:
    """A ``WorkerProcess`` in a Serve replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, role: Role, is_local: bool, token: str
    ) -> None:
        from serving.deployments.worker import WorkerProcess  # torch, only where a model runs

        unique_id = serve.get_replica_context().replica_id.unique_id
        host = "127.0.0.1" if is_local else _node_ip()
        self._drain_s = config.drain_s
        self._worker = WorkerProcess(config, f"{role}-{unique_id}", role, host, token)
        await self._worker.start(await asyncio.to_thread(resolve, config.model))
        _settle()

    def record_replica_metadata(self) -> dict[str, Any]:
        """What every gateway's ``MembershipRouter`` reads."""
        worker = self._worker
        return {
            "worker_id": worker.worker_id,
            "address": worker.address,
            "incarnation": worker.incarnation,
            "role": worker.role,
        }

    def check_health(self) -> None:
        if not self._worker.is_healthy:
            raise RuntimeError("the step loop has stopped or fails at every step")

    async def __del__(self) -> None:
        """Serve awaits this once no gateway sends anything new here, and then ends the process."""
        if hasattr(self, "_worker"):
            await self._worker.drain(self._drain_s)
            await self._worker.stop()


class GatewayReplica:
    """A ``FrontDoor`` in a Serve replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, pools: dict[Role, DeploymentHandle[Any]], token: str
    ) -> None:
        self._drain_s = config.drain_s
        folder = await asyncio.to_thread(resolve, config.model)
        self._front = FrontDoor(config, folder, token)
        await self._front.start(patience_s=START_TIMEOUT_S)
        loop = asyncio.get_running_loop()

        def on_change(addresses: membership.Addresses) -> None:
            loop.call_soon_threadsafe(self._front.update, addresses)

        membership.listen(on_change)
        for handle in pools.values():
            handle.options(stream=False)  # makes the handle's router, which then listens
        _settle()
        if config.scaling.is_on:
            deployed: dict[str, int] = {role: config.count(role) for role in pools}
            self._front.scale_with(ServeReplicas(APP, deployed))

    def check_health(self) -> None:
        if not self._front.is_serving:
            raise RuntimeError("a server of the front door has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_front"):
            await self._front.stop(self._drain_s)


def build_app(config: Config, *, is_local: bool, num_gpus: float = 0.0) -> serve.Application:
    """``is_local``: everything runs on this machine, so nothing listens beyond loopback.

    ``num_gpus`` is what one worker takes; 0 for a CPU. Processes of one deployment know each other
    by a token that is made here, or is kept in a file for deployments that replace each other.
    """
    token = _token(config.cluster_token_file)
    router = {"request_router_class": ROUTER}
    pools = {
        role: _deployment(WorkerReplica, role, config, _actor(config, role, is_local, num_gpus))
        .options(num_replicas=config.count(role), request_router_config=router)
        .bind(config, role, is_local, token)
        for role in ROLES
        if config.count(role)
    }
    gateway = _deployment(GatewayReplica, GATEWAY, config, _actor(config, GATEWAY, is_local))
    app: serve.Application = gateway.bind(config, pools, token)
    return app


def _actor(config: Config, pool: str, is_local: bool, num_gpus: float = 0.0) -> dict[str, Any]:
    """What Ray has to offer where a replica lives."""
    resources = _here() if is_local else {}
    if config.placement == "labelled":
        resources[f"{APP}_{pool}"] = 0.001
    return {"num_cpus": 0, "num_gpus": num_gpus, "resources": resources}


def _settle() -> None:
    """What is loaded by now is there to stay. The garbage collector need not look at it again: a
    tenth of a second in which every stream would wait."""
    gc.collect()
    gc.freeze()


def _deployment(
    replica: type, name: str, config: Config, actor: dict[str, Any]
) -> serve.Deployment:
    """What both kinds have in common: no Serve queue, quick health checks, time to drain."""
    make: Callable[[type], serve.Deployment] = serve.deployment(
        name=name,
        max_ongoing_requests=100,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=config.drain_s + 10,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
        ray_actor_options=actor,
    )
    return make(replica)


def _token(path: str) -> str:
    """ConfigError when the file has none worth the name."""
    if not path:
        return secrets.token_hex(32)
    try:
        token = Path(path).expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster_token_file: {path}: {type(error).__name__}") from None
    if not re.fullmatch(r"[!-~]{32,512}", token):
        raise ConfigError(f"cluster_token_file: {path} must hold 32 to 512 printable characters")
    return token


def _here() -> dict[str, float]:
    """The resource that only this machine has."""
    return {f"node:{_node_ip()}": 0.001}


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def source_root() -> str:
    """The folder that makes our packages importable, for Ray's workers."""
    return str(Path(sys.modules["serving"].__path__[0]).parent)
