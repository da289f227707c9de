"""What a model needs and a GPU has, and how long their steps take, as far as anybody said.

Facts lie in ``bench/catalogue``. Where a table of measured steps exists it is used; elsewhere the
step time follows from arithmetic and bandwidth, and says so.
"""

import json
from dataclasses import dataclass
from typing import Any

from bench.sim.latency import Coefficients, Latency, Link
from bench.sim.profiles import CATALOGUE, distserve, llama3_8b
from kvtransfer.core.handle import KVLayout

MEMORY_USED = 0.9  # of a GPU, by weights and pages
ACTIVATION_BYTES = 3e9  # per GPU
COMPUTE_PART, BANDWIDTH_PART = 0.55, 0.75  # of the data sheet's figures that engines reach
STEP_S = 3e-3  # launching and sampling, where only data sheets are known
TABLE_LEAVES_OUT_S = 1.5e-3  # head, norms, sampling and CPU time of the Llama-3-8B table
SPLIT_LOSS = 0.92  # of the ideal that each doubling of a tensor-parallel group keeps


class CatalogueError(ValueError):
    """No such model or GPU, or one does not fit the other."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    params: float
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_heads: int
    max_model_len: int

    @property
    def weight_bytes(self) -> float:
        return 2 * self.params

    def layout(self, page_size: int) -> KVLayout:
        return KVLayout(
            self.name, self.num_layers, self.num_kv_heads, self.head_dim, page_size, "bfloat16"
        )


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: float
    bytes_per_s: float
    flops: float
    link_bytes_per_s: float  # between workers, each way

    @property
    def link(self) -> Link:
        return Link(2e-3, 0.8 * self.link_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Times:
    """A latency model, where it comes from, and how far it may be off."""

    latency: Latency
    host_s: float
    source: str
    error: float  # relative, as a guess that errs on the safe side


def model(name: str) -> Model:
    return Model(name, **_entry("models", name))


def gpu(name: str) -> Gpu:
    return Gpu(name, **_entry("gpus", name))


def num_pages(model: Model, gpu: Gpu, tp: int, page_size: int) -> int:
    """Pages of one worker; 0 when not even the weights fit."""
    per_gpu = MEMORY_USED * gpu.memory_bytes - ACTIVATION_BYTES
    room = tp * per_gpu - model.weight_bytes
    return max(0, int(room / model.layout(page_size).page_bytes))


def times(model: Model, gpu: Gpu, tp: int) -> Times:
    """The best that is known about a worker of ``tp`` GPUs."""
    if model.name == "llama-3.1-8b" and tp == 1 and gpu.name in ("a100", "h100", "h200"):
        source = "sums of measured GEMM and attention times"
        return Times(llama3_8b(gpu.name, gpu.link), TABLE_LEAVES_OUT_S, source, 0.15)
    if model.name == "opt-13b" and gpu.name == "a100" and tp in (1, 2, 4):
        return Times(distserve("facebook/opt-13b", tp, gpu.link), 0.0, "DistServe's fit", 0.1)
    return Times(_estimate(model, gpu, tp), 0.0, "estimated from data sheets", 0.3)


def _estimate(model: Model, gpu: Gpu, tp: int) -> Coefficients:
    """Prompts are bound by arithmetic, decodes by reading the weights and their context."""
    gpus = tp * SPLIT_LOSS ** (tp.bit_length() - 1)
    flops, read = COMPUTE_PART * gpu.flops * gpus, BANDWIDTH_PART * gpu.bytes_per_s * gpus
    per_pair = (
        4 * model.num_layers * model.num_heads * model.head_dim
    )  # QK and PV of one token pair
    return Coefficients(
        fixed_s=STEP_S + model.weight_bytes / read,
        prefill_token_s=2 * model.params / flops,
        attention_s=per_pair / 2 / (0.7 * flops),
        decode_s=2 * model.params / flops,
        context_s=model.layout(1).page_bytes / read,
        link=gpu.link,
    )


def _entry(kind: str, name: str) -> dict[str, Any]:
    entries = json.loads((CATALOGUE / f"{kind}.json").read_text())
    if name not in entries:
        raise CatalogueError(f"{name!r} is not among the {kind}: {', '.join(entries)}")
    entry: dict[str, Any] = entries[name]
    return entry
