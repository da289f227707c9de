"""Ray as the command line uses it: start or join one, deploy, watch, and leave nothing behind.

Every failure that a person can mend becomes a ``LaunchError`` of one line.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

# Read by Ray when it is imported or starts its processes; what is set already wins.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # else every worker runs at nice 15
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # at 0.1 it takes 3 % of a core, for nothing
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "GRPC_VERBOSITY": "NONE",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.exceptions import RayError  # noqa: E402
from ray.serve._private.constants import (  # noqa: E402
    SERVE_CONTROLLER_NAME,
    SERVE_NAMESPACE,
)
from ray.serve.schema import ApplicationStatus  # noqa: E402

from serving.config import Config  # noqa: E402
from serving.deployments.app import APP, build_app, source_root  # noqa: E402
from workers.models.config import ModelConfig, ModelError  # noqa: E402
from workers.weights import resolve  # noqa: E402

OBJECT_STORE_BYTES = 128 << 20  # nothing of ours goes through it
KNOCK_S = 3.0
INIT_ATTEMPTS = 3  # a starved machine may take its dashboard agent down with it

Say = Callable[[str], None]


class LaunchError(Exception):
    """It cannot be served like this; the message is one line that says what to do."""


def check_model(config: Config) -> None:
    """Find the model and see that it can be served, before anything is started."""
    try:
        model = ModelConfig.load(resolve(config.model))
    except ModelError as error:
        raise LaunchError(str(error)) from None
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise LaunchError(
            f"max_model_len: {config.max_model_len} is more than the model's {model.max_model_len}"
        )


class Launch:
    """One deployment, from ``start`` to ``stop``."""

    def __init__(self, config: Config, say: Say) -> None:
        self._config, self._say = config, say
        self.is_ours = False  # the Ray was started here, so it ends here
        self._is_deployed = False
        self._found_serve = False  # somebody else's: it outlives our application

    def start(self) -> None:
        """Start or join Ray and deploy. Returns once the application is being brought up."""
        self._connect()
        if APP in serve.status().applications:
            raise LaunchError(
                "the Ray that runs here serves an Evenflow already: start another one beside it "
                "with --ray local (and other ports), or end that one first"
            )
        config = self._config
        num_gpus = self._gpus_per_worker()
        self._say(f"deploying {config.num_workers} workers")
        app = build_app(config, is_local=self.is_ours, num_gpus=num_gpus)
        self._found_serve = _is_serve_running()
        self._is_deployed = True
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")
        target = serve.RunTarget(
            target=app,
            name=APP,
            route_prefix=None,
            external_scaler_enabled=config.scaling.is_on,
        )
        serve.run_many([target], wait_for_applications_running=False)

    def raise_if_failed(self) -> None:
        """LaunchError once Serve has given the application up."""
        try:
            application = serve.status().applications.get(APP)
        except RayError as error:
            raise LaunchError(f"Ray is gone: {_first_line(error)}") from None
        if application is None:
            raise LaunchError("the application was deleted by somebody else")
        if application.status is ApplicationStatus.DEPLOY_FAILED:
            reasons = [application.message, *(d.message for d in application.deployments.values())]
            raise LaunchError(f"Serve could not start it: {_cause(reasons)}")

    @property
    def is_running(self) -> bool:
        """Whether Serve has brought up every replica."""
        application = serve.status().applications.get(APP)
        return application is not None and application.status is ApplicationStatus.RUNNING

    def stop(self, drain: bool = False) -> None:
        """End what was started here. ``drain`` lets running requests finish first."""
        if self._is_deployed and (drain or not self.is_ours):
            with contextlib.suppress(RayError, TimeoutError, serve.exceptions.RayServeException):
                serve.delete(APP)
                if not self._found_serve:
                    serve.shutdown()  # type: ignore[no-untyped-call]
            self._is_deployed = False
        ray.shutdown()

    def _connect(self) -> None:
        address = self._config.ray
        if address == "auto" and (running := os.environ.get("RAY_ADDRESS")):
            address = running
        if address != "local":
            self._say("looking for a running Ray")
            if self._join(address):
                return
        if self._config.device == "cuda":
            _check_cuda()
        self._say("starting Ray")
        for attempt in range(1, INIT_ATTEMPTS + 1):
            try:
                self._init(address="local", include_dashboard=False, num_cpus=_num_cpus())
            except Exception as error:  # Ray's own "timed out during startup" is of no other class
                ray.shutdown()
                if attempt == INIT_ATTEMPTS:
                    raise LaunchError(f"Ray does not start: {_first_line(error)}") from None
            else:
                self.is_ours = True
                return

    def _join(self, address: str) -> bool:
        """Whether a Ray was found. One that was named has to be there; ``auto`` may find none."""
        if address != "auto":
            _knock(address)
        path = ":".join(filter(None, (source_root(), os.environ.get("PYTHONPATH"))))
        try:
            self._init(address=address, runtime_env={"env_vars": {"PYTHONPATH": path}})
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            ray.shutdown()
            if address == "auto":
                return False
            raise LaunchError(
                f"the Ray at {address} refuses: {_first_line(error)}; when it wants a token, set "
                "RAY_AUTH_MODE=token"
            ) from None
        return True

    def _init(self, **options: Any) -> None:
        if options["address"] == "local":
            options["object_store_memory"] = OBJECT_STORE_BYTES
            os.environ["PYTHONPATH"] = ":".join(
                filter(None, (source_root(), os.environ.get("PYTHONPATH")))
            )
        with _without_ray_address():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, namespace="serve", **options)

    def _gpus_per_worker(self) -> float:
        config = self._config
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        num_gpus = int(resources.get("GPU", 0)) if config.device != "cpu" else 0
        if config.device == "cuda" and num_gpus == 0:
            raise LaunchError("device: cuda is asked for and Ray has no GPU; use --device cpu")
        if 0 < num_gpus < config.most_workers:
            raise LaunchError(
                f"{config.most_workers} workers need {config.most_workers} GPUs and Ray has "
                f"{num_gpus}: lower --mixed, --prefill and --decode (or scaling.max_workers), or "
                "use --device cpu"
            )
        return 1.0 if num_gpus else 0.0


def _check_cuda() -> None:
    """LaunchError when this machine has no GPU: a Ray that starts here will have none either."""
    from workers.runner import find_device  # torch, which nobody else waits for

    try:
        find_device("cuda")
    except ModelError as error:
        raise LaunchError(f"{error}; use --device cpu") from None


def _is_serve_running() -> bool:
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _knock(address: str) -> None:
    """LaunchError at once when nobody listens there: Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), KNOCK_S).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LaunchError(
            f"no Ray answers at {address} ({reason}): start one with `ray start --head`, or use "
            "--ray local"
        ) from None


@contextlib.contextmanager
def _without_ray_address() -> Iterator[None]:
    """``ray.init`` prefers the variable to its argument in some cases; the decision is made."""
    kept = os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        if kept is not None:
            os.environ["RAY_ADDRESS"] = kept


def _num_cpus() -> int:
    return max(2, os.cpu_count() or 2)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _cause(messages: list[str]) -> str:
    """The last line of the first traceback: what went wrong, without how."""
    for message in messages:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line.split(":")[0]]
        if errors:
            return errors[-1]
    return next((m.strip().splitlines()[0] for m in messages if m.strip()), "no reason given")
