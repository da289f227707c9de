"""What an operator may choose: one YAML file and the flags over it, read once and then frozen.

It knows names, limits and units. It refuses to look at the machine: whatever depends on the
device (``auto``, ``None``) is found out by the process that owns the device.
"""

import dataclasses
import difflib
import ipaddress
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

Policy = Literal["chunked", "splitfuse", "prefill-first", "static"]
Dtype = Literal["auto", "float32", "bfloat16"]
Role = Literal["mixed", "prefill", "decode"]
ROLES: tuple[Role, ...] = typing.get_args(Role)

T = TypeVar("T")
DEMO_NAME = "SmolLM2-135M-Instruct"

_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "h": 3600.0}


class ConfigError(ValueError):
    """A setting that cannot be used; the message names its key and the value."""


def seconds(value: str | float, key: str = "duration") -> float:
    """``"100ms"``, ``"2s"``, ``"1.5m"`` or a plain number of seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|)\s*", str(value))
    if isinstance(value, bool) or match is None:
        raise ConfigError(f"{key}: {value!r} is not a duration such as 2s or 100ms")
    return float(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True, slots=True)
class SloConfig:
    """Promised to requests that do not bring their own."""

    ttft: str | float = "2s"
    itl: str | float = "100ms"

    @property
    def ttft_s(self) -> float:
        return seconds(self.ttft, "slo.ttft")

    @property
    def itl_s(self) -> float:
        return seconds(self.itl, "slo.itl")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files on the gateway's machine. Without ``cert`` both doors speak plain text."""

    cert: str = ""
    key: str = ""
    client_ca: str = ""  # clients have to show a certificate that this authority signed

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise ConfigError("tls: cert and key belong together")
        if self.client_ca and not self.cert:
            raise ConfigError("tls.client_ca: needs tls.cert and tls.key")

    @property
    def is_on(self) -> bool:
        return bool(self.cert)


@dataclass(frozen=True, slots=True)
class ClusterTlsConfig:
    """PEM files on every machine: gateways and workers show each other this certificate, which
    ``ca`` signed for the name "evenflow". Without it they speak plain text."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def __post_init__(self) -> None:
        given = [bool(path) for path in (self.cert, self.key, self.ca)]
        if any(given) and not all(given):
            raise ConfigError("cluster_tls: cert, key and ca belong together")

    @property
    def is_on(self) -> bool:
        return bool(self.cert)


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """How roles and numbers of workers follow the demand. A pool keeps its number unless it has a
    range such as ``1-4``; without any range nothing changes by itself."""

    mixed: str = ""
    prefill: str = ""
    decode: str = ""
    max_workers: int | None = None  # over all pools; None: what the ranges allow
    flips: bool = True  # workers may change between prefill and decode
    period: str | float = "10s"  # between two decisions
    window: str | float = "60s"  # that demand is meaned over
    look_back: str | float = "5m"  # a worker goes that was not needed for so long
    cool_down: str | float = "2m"  # before what was added or flipped may go

    def __post_init__(self) -> None:
        for role in ROLES:
            self.range(role, 1)
        for key in ("period", "window", "look_back", "cool_down"):
            if seconds(getattr(self, key), f"scaling.{key}") <= 0:
                raise ConfigError(f"scaling.{key}: must be above zero")

    @property
    def is_on(self) -> bool:
        return any(getattr(self, role) for role in ROLES)

    def range(self, role: Role, count: int) -> tuple[int, int]:
        """The least and the most workers of a pool that starts with ``count``."""
        text = getattr(self, role)
        if not text:
            return count, count
        match = re.fullmatch(r"\s*(\d{1,4})\s*-\s*(\d{1,4})\s*", str(text))
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"scaling.{role}: {text!r} is not a range such as 1-4")
        return int(match[1]), int(match[2])

    @property
    def period_s(self) -> float:
        return seconds(self.period, "scaling.period")

    @property
    def window_s(self) -> float:
        return seconds(self.window, "scaling.window")

    @property
    def look_back_s(self) -> float:
        return seconds(self.look_back, "scaling.look_back")

    @property
    def cool_down_s(self) -> float:
        return seconds(self.cool_down, "scaling.cool_down")


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting of a deployment. ``None`` means: found out where it is used."""

    # the model
    model: str = ""  # folder, .gguf file or Hugging Face id; empty: the demo model
    served_model_name: str = ""  # empty: the model's own name
    dtype: Dtype = "auto"  # bfloat16 where the device computes in it, float32 elsewhere
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None  # None: what the model was made for
    # the pools: how many workers start in each role
    mixed: int = 1
    prefill: int = 1
    decode: int = 0
    threads: int | None = None  # of one worker on a CPU; None: the cores, shared evenly
    # one worker
    policy: Policy = "chunked"
    max_num_batched_tokens: int | None = None  # per step; None: by the gaps promised
    max_num_seqs: int = 64
    page_size: int | None = None  # tokens; None: 16 on a CPU, what its kernels take on CUDA
    num_pages: int | None = None  # None: by free memory
    prefix_caching: bool = True  # keep computed prefixes until their pages are needed
    # the front door
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 9000
    max_queue: int = 256  # requests waiting for one worker before new ones are refused
    refuse_late: bool = False  # refuse at once what queues would keep from its TTFT everywhere
    max_body_bytes: int = 8 << 20
    tls: TlsConfig = field(default_factory=TlsConfig)
    api_keys: str = ""  # a file of key hashes, see serving/auth.py; empty: everybody may
    insecure: bool = False  # listen beyond this machine without TLS and keys all the same
    slo: SloConfig = field(default_factory=SloConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    # what may go wrong
    lease_s: float = 30.0  # pages handed off are kept this long for a receiver that is silent
    transfer_timeout_s: float = 5.0
    early_fetch: bool = True  # pages move to a decode worker while the prompt is still computed
    stall_timeout_s: float = 60.0  # a worker without progress for this long counts as lost
    drain_s: float = 60.0  # how long a worker that is being stopped may finish its streams
    placement: Literal["any", "labelled"] = "any"  # labelled: pools on nodes that offer their name
    cluster_token_file: str = ""  # kept across deployments; empty: a new token for each
    cluster_tls: ClusterTlsConfig = field(default_factory=ClusterTlsConfig)
    # elsewhere
    ray: str = "auto"  # join a running Ray or start one; "local": start one; else its address
    state: str = "memory"
    record: str = ""  # a file on the gateway's machine: who asked when for how much, no contents
    tracing: str = ""  # where OpenTelemetry traces go, OTLP over HTTP: http://collector:4318
    page_faults: str = ""  # for tests: "drop=0.05 flip=0.05 seed=3", see kvtransfer/faults.py
    step_faults: str = ""  # for tests: "raise_at=20 freeze_at=90 freeze_s=2", see workers/faults.py
    debug: bool = False  # page ledgers and pinned workers for tests

    def __post_init__(self) -> None:
        self._check_reach()
        self._check_scaling()
        for key, (low, high) in _LIMITS.items():
            value = getattr(self, key)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{key}: {value} is not between {low} and {high}")
        if self.num_workers == 0:
            raise ConfigError("mixed, prefill, decode: at least one worker is needed")
        if self.http_port == self.grpc_port != 0:
            raise ConfigError(f"grpc_port: {self.grpc_port} is the HTTP port already")
        if not re.fullmatch(r"memory|(rediss?|unix)://\S+", self.state):
            raise ConfigError(f"state: {self.state!r} is neither memory nor redis://host:port")
        if self.tracing and not re.fullmatch(r"https?://\S+", self.tracing):
            raise ConfigError(f"tracing: {self.tracing!r} is not http://host:port")
        if not re.fullmatch(r"auto|local|[^:/]+:\d+", self.ray):
            raise ConfigError(f"ray: {self.ray!r} is neither auto, local nor host:port")
        if self.slo.ttft_s <= 0 or self.slo.itl_s <= 0:
            raise ConfigError(f"slo: {self.slo.ttft!r} and {self.slo.itl!r} must be above zero")

    def _check_scaling(self) -> None:
        """A pool starts within its range, and all of them within the limit."""
        for role in ROLES:
            least, most = self.scaling.range(role, self.count(role))
            if not least <= self.count(role) <= most:
                raise ConfigError(
                    f"scaling.{role}: the pool starts with {self.count(role)} workers, and that is "
                    f"not within {least}-{most}"
                )
        if self.scaling.is_on and self.most_workers < self.num_workers:
            raise ConfigError(
                f"scaling.max_workers: {self.most_workers} is less than the {self.num_workers} "
                "workers to start with"
            )

    def _check_reach(self) -> None:
        """Whoever opens the door to a network says so, or guards it."""
        if self.is_guarded or self.insecure or is_loopback(self.host):
            return
        raise ConfigError(
            f"host: {self.host} can be reached from other machines: set tls.cert, tls.key and "
            "api_keys (or tls.client_ca), or say insecure: true (--insecure)"
        )

    @property
    def is_guarded(self) -> bool:
        """Strangers neither read along nor get an answer."""
        return self.tls.is_on and bool(self.api_keys or self.tls.client_ca)

    @property
    def num_workers(self) -> int:
        return self.mixed + self.prefill + self.decode

    @property
    def most_workers(self) -> int:
        """How many there may be when the demand is high."""
        most = sum(self.scaling.range(role, self.count(role))[1] for role in ROLES)
        limit = self.scaling.max_workers
        return most if limit is None else min(most, limit)

    def count(self, role: Role) -> int:
        """How many workers start in ``role``."""
        return {"mixed": self.mixed, "prefill": self.prefill, "decode": self.decode}[role]


_LIMITS: dict[str, tuple[float, float]] = {
    "max_model_len": (1, 1 << 24),
    "mixed": (0, 1024),
    "prefill": (0, 1024),
    "decode": (0, 1024),
    "threads": (1, 1024),
    "max_num_batched_tokens": (1, 1 << 20),
    "max_num_seqs": (1, 1 << 16),
    "page_size": (1, 4096),
    "num_pages": (1, 1 << 30),
    "http_port": (0, 65535),
    "grpc_port": (0, 65535),
    "max_queue": (1, 1 << 20),
    "max_body_bytes": (1024, 1 << 31),
    "lease_s": (0.1, 86400),
    "transfer_timeout_s": (0.1, 3600),
    "stall_timeout_s": (0.5, 86400),
    "drain_s": (0, 86400),
}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it. A name other than localhost may mean anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The YAML file at ``path`` with ``overrides`` on top; an override of ``None`` is none.

    Overrides of a nested key are written with a dot: ``{"slo.ttft": "2s"}``.
    """
    values = _read(path) if path is not None else {}
    for key, value in (overrides or {}).items():
        if value is not None:
            section, _, leaf = key.rpartition(".")
            target = values.setdefault(section, {}) if section else values
            if not isinstance(target, dict):
                raise ConfigError(f"{section}: {target!r} is not a mapping")
            target[leaf] = value
    return _build(Config, values, "")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path}: a mapping of keys to values is expected")
    return values


def _build(kind: type[T], values: Mapping[str, Any], prefix: str) -> T:
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise ConfigError(f"{key}: no such key{hint}")
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise ConfigError(f"{key}: {value!r} is not a mapping")
            checked[name] = _build(hints[name], value, f"{key}.")
        else:
            checked[name] = _check(key, value, hints[name])
    return kind(**checked)


def _check(key: str, value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` allows it: a whole number may stand for a float, a bool never."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            raise ConfigError(f"{key}: {value!r} is not one of {', '.join(allowed)}")
        return value
    choices = typing.get_args(hint) if origin in (types.UnionType, typing.Union) else (hint,)
    if float in choices and type(value) is int:
        return float(value)
    if type(value) in choices or (value is None and type(None) in choices):
        return value
    names = " or ".join(c.__name__ for c in choices if c is not type(None))
    raise ConfigError(f"{key}: {value!r} is not of type {names}")
