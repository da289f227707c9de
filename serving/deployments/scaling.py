"""Replica counts through Ray Serve's controller, for ``serving.scaler``.

The application is deployed for an external scaler: Serve changes a count when it is told, and never
by itself. A replica that Serve stops hands its streams off first (``WorkerReplica.__del__``).
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve.context import _get_global_client

CALL_TIMEOUT_S = 10.0
WANTED = (
    ReplicaState.STARTING,
    ReplicaState.UPDATING,
    ReplicaState.RECOVERING,
    ReplicaState.RUNNING,
)


class ServeReplicas:
    """``serving.scaler.Replicas``, in a process of the application itself."""

    def __init__(self, app: str, pools: Mapping[str, int]) -> None:
        """``pools`` are those that may change, with the workers they were deployed with."""
        self._app, self._pools = app, pools

    async def targets(self) -> Mapping[str, int]:
        """What Serve brings up or keeps, so that a gateway that starts again goes on from there."""
        application = await asyncio.to_thread(self._application)
        targets = {}
        for pool, deployed in self._pools.items():
            deployment = application.deployments.get(pool) if application else None
            states = deployment.replica_states if deployment else {}
            targets[pool] = sum(states.get(state.value, 0) for state in WANTED) or deployed
        return targets

    async def set_target(self, pool: str, num: int) -> None:
        controller = await asyncio.to_thread(_controller)
        name = DeploymentID(name=pool, app_name=self._app)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await controller.update_deployment_replicas.remote(name, num)

    def _application(self) -> Any:
        return serve.status().applications.get(self._app)


def _controller() -> Any:
    client = _get_global_client()
    assert client is not None, "a replica is connected to its Serve"
    return client._controller
