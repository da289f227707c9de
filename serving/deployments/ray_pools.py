"""How Ray Serve tells this process who belongs to the pools.

Serve's long poll reaches every process that holds a handle through the handle's request router.
Ours routes like the default one and passes on who is there: no registry of our own, no polling,
and no request ever travels this way.
"""

from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import RunningReplica

from serving.deployments import membership


class MembershipRouter(PowerOfTwoChoicesRequestRouter):
    """Serve makes one per handle, in the process that holds it."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        metadata: list[dict[str, Any]] = [replica.replica_metadata for replica in replicas]
        addresses = {m["worker_id"]: m["address"] for m in metadata if m}
        membership.replace(self._deployment_id.name, addresses)
