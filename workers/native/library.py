"""The kernels as Python calls them: tensors in, tensors out.

The structs here mirror those in pages.h, linear.h, rows.h and kernels.cpp, field by field. Shapes
are checked by the callers, once, when a model is loaded; a call only passes pointers.
"""

import ctypes
import logging
import os
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from workers.batch import AttentionMetadata
from workers.kvcache import KVCache
from workers.memory import use_huge_pages
from workers.models.config import ModelError
from workers.native.build import ISAS, BuildError, best_isa, open_library

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float32)
MAX_HEAD_DIM, MAX_HEADS_PER_KV_HEAD = 256, 128  # attention.h, schedule.h
CACHE_LINE, SLAB_BYTES = 64, 64 << 20


class Linear(ctypes.Structure):
    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("gated", c_int64),
    )


class Pool(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("layers", c_int64),
        ("heads", c_int64),
        ("page_size", c_int64),
        ("head_dim", c_int64),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("num_spans", c_int64),
        ("tokens", c_void_p),
        ("spans", c_void_p),
        ("pages", c_void_p),
        ("rotation", c_void_p),
        ("num_wanted", c_int64),
        ("wanted", c_void_p),
    )


class HeadNorms(ctypes.Structure):
    _fields_ = (("query", c_void_p), ("key", c_void_p), ("eps", c_float))


class Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("is_bf16", c_int64),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_float),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("layers", c_void_p),
        ("head", Linear),
    )


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {  # name: (result, arguments)
    "scratch_bytes": (c_int64, [c_void_p, c_int64]),
    "forward": (None, [c_void_p] * 5 + [c_int]),
    "logits": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int]),
    "argmax": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int]),
    "pin_team": (None, [c_void_p, c_int]),
    "packed_columns": (c_int64, [c_int64, c_int]),
    "pack": (None, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int, c_void_p, c_void_p]),
    "read_all": (c_float, [c_void_p, c_int64, c_int]),
    "multiply": (c_int64, [c_int, c_int64, c_int]),
    "linear": (None, [c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int]),
    "norm": (None, [c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int]),
    "rotate_and_store": (
        None,
        [c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int],
    ),
    "attention": (
        None,
        [c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int],
    ),
}


class PagedBatch:
    """One step's spans and pages as the kernels read them. Keeps its memory alive."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        spans, pages = array("i"), array("i")
        for span in metadata.spans:
            spans.extend((span.start, span.length, span.context, len(pages)))
            pages.extend(span.pages)
        last = metadata.spans[-1]
        self._spans, self._pages = spans, pages
        self.struct = Batch(
            num_tokens=last.start + last.length,
            num_spans=len(metadata.spans),
            spans=spans.buffer_info()[0],
            pages=pages.buffer_info()[0],
        )


class PackedLinear:
    """Weights [outputs, inputs] in the order in which the kernels read them.

    If ``gated``, the first half of the rows is the gate and the second goes with it, and the layer
    gives silu(gate) * up.
    """

    def __init__(
        self,
        kernels: "Kernels",
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        rows, inputs = weight.shape
        outputs = rows // 2 if gated else rows
        columns = kernels.call("packed_columns", outputs, gated)
        self._packed = kernels.room(columns * inputs, weight.dtype)
        self._bias = None if bias is None else torch.empty(columns)
        weight, bias = weight.contiguous(), None if bias is None else bias.float().contiguous()
        kernels.call(
            "pack",
            weight.dtype == torch.bfloat16,
            weight,
            bias,
            inputs,
            outputs,
            gated,
            self._packed,
            self._bias,
        )
        self.outputs = outputs
        self.struct = Linear(_address(self._packed), _address(self._bias), inputs, outputs, gated)


class Kernels:
    """One compiled library. Threads are torch's, as many as torch is set to use."""

    def __init__(self, isa: str, extra_flags: Sequence[str] = ()) -> None:
        self.isa = isa
        library = open_library(isa, extra_flags)
        self._functions = {}
        self._slab = torch.empty(0, dtype=torch.uint8)  # the free rest
        for name, (result, arguments) in SIGNATURES.items():
            function = library[f"evenflow_{name}"]
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def call(self, name: str, *arguments: object) -> int:
        """A tensor is passed as the address of its data, a struct as its own."""
        result: int = self._functions[name](*[_address(argument) for argument in arguments])
        return result

    def room(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """An array that stays, beside others in huge pages where the system has them."""
        num_bytes = -(-size * dtype.itemsize // CACHE_LINE) * CACHE_LINE
        if num_bytes > len(self._slab):
            self._slab = torch.empty(max(num_bytes, SLAB_BYTES), dtype=torch.uint8)
            use_huge_pages(self._slab)
        taken, self._slab = self._slab[:num_bytes], self._slab[num_bytes:]
        return taken.view(dtype)[:size]

    def pin_team(self, processors: Sequence[int]) -> None:
        """Give each of the calling thread's OpenMP threads, itself among them, one processor."""
        own = array("i", processors)
        self.call("pin_team", own.buffer_info()[0], len(own))

    def linear(self, x: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
        out = torch.empty(len(x), weight.outputs, dtype=x.dtype)
        self.call(
            "linear",
            x.dtype == torch.bfloat16,
            weight.struct,
            x,
            len(x),
            out,
            torch.get_num_threads(),
        )
        return out

    def argmax(self, logits: torch.Tensor) -> list[int]:
        """The most likely token of each row [vocab_size], float32; of equal ones the first."""
        best = torch.empty(len(logits), dtype=torch.int64)
        threads = min(len(logits), torch.get_num_threads())  # to wake one takes longer than a row
        self.call("argmax", logits, *logits.shape, best, threads)
        return best.tolist()

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self.call(
            "norm",
            x.dtype == torch.bfloat16,
            x,
            weight,
            out,
            *x.shape,
            eps,
            torch.get_num_threads(),
        )
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotation: torch.Tensor,
        cache: KVCache,
        layer: int,
        batch: PagedBatch,
        norms: Sequence[torch.Tensor | None],
        eps: float,
    ) -> None:
        """Queries are rotated in place in qkv, [num_tokens, heads + 2 * kv_heads, head_dim].

        Keys and values go to their pages. ``rotation``: float32 [num_tokens, head_dim], cosines
        and then sines; ``norms``: weights for query and key heads.
        """
        batch.struct.rotation = rotation.data_ptr()
        self.call(
            "rotate_and_store",
            qkv.dtype == torch.bfloat16,
            pool_of(cache),
            batch.struct,
            layer,
            qkv.shape[1] - 2 * cache.layout.num_kv_heads,
            HeadNorms(*(_address(norm) for norm in norms), eps),
            qkv,
            torch.get_num_threads(),
        )

    def attention(
        self, q: torch.Tensor, cache: KVCache, layer: int, batch: PagedBatch
    ) -> torch.Tensor:
        """q: [num_tokens, heads, head_dim]; rows may be apart."""
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        self.call(
            "attention",
            q.dtype == torch.bfloat16,
            pool_of(cache),
            batch.struct,
            layer,
            q.shape[1],
            q,
            q.stride(0),
            out,
            torch.get_num_threads(),
        )
        return out


def pool_of(cache: KVCache) -> Pool:
    layout = cache.layout
    return Pool(
        cache.pool.data_ptr(),
        layout.num_layers,
        layout.num_kv_heads,
        layout.page_size,
        layout.head_dim,
    )


@cache
def kernels(isa: str | None = None) -> Kernels | None:
    """What this machine can run; None, and one line in the log, when that is nothing.

    ``isa``, or else EVENFLOW_ISA, names an instruction set of ISAS, or "torch" for none.
    """
    isa = isa or os.environ.get("EVENFLOW_ISA") or best_isa()
    if isa == "torch":
        logger.info("compute: torch, as asked")
        return None
    if isa not in ISAS:
        raise ModelError(f"instruction set {isa!r} is none of torch, {', '.join(ISAS)}")
    try:
        found = Kernels(isa)
    except BuildError as error:
        logger.warning("compute: torch, because the native kernels are not there: %s", error)
        return None
    logger.info("compute: native kernels, %s", isa)
    return found


def _address(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    return argument
