"""Decode steps recorded once per batch size and replayed with one launch.

A recording holds addresses, so each size has inputs of its own that a step is copied into. Rows
behind the step's own are padding: they read the first token of page 0, store nothing, and nobody
reads their logits.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from workers.batch import Batch
from workers.cuda.attention import CudaAttention, Tables
from workers.kvcache import KVCache
from workers.models.llama import Llama
from workers.upload import Parcel

logger = logging.getLogger(__name__)

LARGEST = 256  # sequences; beyond that launches no longer bound a step


@dataclass(frozen=True, slots=True)
class Recording:
    replay: Callable[[], None]
    output: torch.Tensor  # written by every replay


class Recorder(Protocol):
    def __call__(self, body: Callable[[], torch.Tensor]) -> Recording:
        """Record what body launches. Its inputs keep their addresses."""
        ...


class CudaRecorder:
    """torch.cuda graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], torch.Tensor]) -> Recording:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            body()  # compiles kernels and makes workspaces, which a recording must not
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = body()
        return Recording(graph.replay, output)


class DecodeGraphs:
    """``logits`` of steps that ``fits``."""

    def __init__(
        self,
        model: Llama,
        cache: KVCache,
        attention: CudaAttention,
        max_pages: int,
        sizes: list[int],
        record: Recorder,
    ) -> None:
        self._model, self._cache, self._attention = model, cache, attention
        self._max_pages, self._sizes = max_pages, sizes
        # The largest first: the smaller ones find room in its memory.
        self._graphs = {size: self._record(size, record) for size in reversed(sizes)}

    def fits(self, batch: Batch) -> bool:
        metadata = batch.attention
        return (
            metadata.num_decodes == len(metadata.spans) <= self._sizes[-1]
            and len(batch.sampled_rows) == len(metadata.spans)
            and max(len(span.pages) for span in metadata.spans) <= self._max_pages
        )

    def logits(self, batch: Batch) -> torch.Tensor:
        """float32 [num_seqs, vocab_size] of a step on the host; the next step overwrites them."""
        num_seqs = len(batch.tokens)
        graph = self._graphs[self._sizes[bisect_left(self._sizes, num_seqs)]]
        graph.inputs.load(batch.tokens, batch.positions, Tables.of(batch.attention))
        graph.recording.replay()
        return graph.recording.output[:num_seqs]

    def _record(self, size: int, record: Recorder) -> "_Graph":
        inputs = _Inputs(size, self._max_pages, self._model.device)
        tokens, positions, slots, contexts, pages = inputs.views
        none = torch.empty(0, dtype=torch.int32, device=self._model.device)
        tables = Tables(slots, contexts, pages, none, none, size, 0, 0)

        def body() -> torch.Tensor:
            plan = self._attention.plan_for(tables)
            return self._model.logits(self._model.forward(tokens, positions, self._cache, plan))

        return _Graph(inputs, record(body))


class _Inputs:
    """The addresses that one recording reads."""

    def __init__(self, size: int, max_pages: int, device: torch.device) -> None:
        self.size, self._max_pages = size, max_pages
        empty = torch.empty(0, dtype=torch.int64)
        padding = self._padded(empty, empty, empty, empty.int(), torch.empty(0, 0).int())
        self._parcel = Parcel.of(padding)
        self._buffer = self._parcel.fill(padding, device).to(device)
        self.views = self._parcel.views(self._buffer)

    def load(self, tokens: torch.Tensor, positions: torch.Tensor, tables: Tables) -> None:
        """One copy, which the host does not wait for."""
        rows = self._padded(tokens, positions, tables.slots, tables.contexts, tables.pages)
        self._buffer.copy_(self._parcel.fill(rows, self._buffer.device), non_blocking=True)

    def _padded(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        contexts: torch.Tensor,
        pages: torch.Tensor,
    ) -> list[torch.Tensor]:
        rows = self.size - len(tokens)
        columns = self._max_pages - pages.shape[1]
        return [
            F.pad(tokens, (0, rows)),
            F.pad(positions, (0, rows)),
            F.pad(slots, (0, rows), value=-1),
            F.pad(contexts, (0, rows), value=1),
            F.pad(pages, (0, columns, 0, rows)),
        ]


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: _Inputs
    recording: Recording


def batch_sizes(max_seqs: int) -> list[int]:
    """Sizes to record: padding wastes at most half of a small batch and seven rows of a large."""
    largest = min(max_seqs, LARGEST)
    sizes = {1, 2, 4, *range(8, largest, 8), largest}
    return sorted(size for size in sizes if size <= largest)


def record_decodes(
    model: Llama, cache: KVCache, attention: CudaAttention, max_pages: int, max_seqs: int
) -> DecodeGraphs | None:
    """None, with a line in the log, where the kernels cannot be recorded: steps run eagerly."""
    try:
        return DecodeGraphs(
            model, cache, attention, max_pages, batch_sizes(max_seqs), CudaRecorder()
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        logger.warning("decode steps are not recorded as CUDA graphs: %s", reason)
        return None
