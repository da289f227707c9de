"""Attention on CUDA: decodes with their contexts split across the GPU, chunks through a varlen
kernel, straight over the pages.

Written to the documented contracts of flash-attn and torch, and tested against those contracts; no
GPU has run it yet. What a step needs of the host arrives as ``Tables``, so that the same call can
be captured into a graph.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from workers.batch import AttentionMetadata
from workers.cuda import kernels
from workers.kvcache import KVCache

PAGE_MULTIPLE = 256  # of FlashAttention 2's paged kernels, in flash-attn and in torch
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Tables:
    """One step's sequences, decodes first: tensors on one device and the host's numbers."""

    slots: torch.Tensor  # int64 [num_tokens]: page * page_size + offset; -1: not stored
    contexts: torch.Tensor  # int32 [num_seqs]
    pages: torch.Tensor  # int32 [num_seqs, width]
    starts: torch.Tensor  # int32 [num_chunks + 1]: first rows of the chunks, behind the decodes
    context_starts: torch.Tensor  # int32 [num_chunks + 1]: running sum of the chunks' contexts
    num_decodes: int
    max_length: int  # of a chunk, in rows
    max_chunk_context: int

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> "Tables":
        """On the metadata's device."""
        pages, offsets = metadata.slots
        n = metadata.num_decodes
        chunks = metadata.spans[n:]
        return cls(
            slots=pages * metadata.page_size + offsets,
            contexts=metadata.seqused_k,
            pages=metadata.page_table,
            starts=metadata.cu_seqlens_q[n:] - n,  # a decode is one row
            context_starts=F.pad(metadata.seqused_k[n:].cumsum(0, dtype=torch.int32), (1, 0)),
            num_decodes=n,
            max_length=max((span.length for span in chunks), default=0),
            max_chunk_context=max((span.context for span in chunks), default=0),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.slots, self.contexts, self.pages, self.starts, self.context_starts

    def with_tensors(self, tensors: list[torch.Tensor]) -> "Tables":
        """The same step, its tensors elsewhere."""
        slots, contexts, pages, starts, sums = tensors
        return replace(
            self, slots=slots, contexts=contexts, pages=pages, starts=starts, context_starts=sums
        )


class Library(Protocol):
    """The kernels of one library. keys and values are [page, page_size, kv_head, head_dim]."""

    name: str

    def decodes(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables
    ) -> torch.Tensor:
        """Attention of the first ``num_decodes`` rows, q [num_decodes, heads, head_dim]."""
        ...

    def chunks(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables
    ) -> torch.Tensor:
        """Attention of the rows behind the decodes."""
        ...


class CudaAttention:
    """An attention backend on one library's kernels."""

    page_size_multiple = PAGE_MULTIPLE

    def __init__(self, library: Library) -> None:
        self.name, self._library = library.name, library

    def plan(self, metadata: AttentionMetadata, dtype: torch.dtype) -> "CudaPlan":
        return self.plan_for(Tables.of(metadata))

    def plan_for(self, tables: Tables) -> "CudaPlan":
        return CudaPlan(self._library, tables)


class CudaPlan:
    def __init__(self, library: Library, tables: Tables) -> None:
        self._library, self._tables = library, tables
        self.slots = tables.slots

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, layer: int) -> None:
        """For models without a fused store. Every row has a slot here."""
        size = cache.layout.page_size
        pages, offsets = self.slots // size, self.slots % size
        cache.keys[layer][pages, :, offsets] = k
        cache.values[layer][pages, :, offsets] = v

    def forward(self, q: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        keys, values = (x[layer].transpose(1, 2) for x in (cache.keys, cache.values))
        tables, n = self._tables, self._tables.num_decodes
        parts = []
        if n:
            parts.append(self._library.decodes(q[:n], keys, values, tables))
        if n < len(q):
            parts.append(self._library.chunks(q[n:], keys, values, tables))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class FlashAttn:
    """flash-attn 2: its decode kernel splits contexts by itself. ``flash`` is the module."""

    name = "flash-attn"

    def __init__(self, flash: Any = None) -> None:
        if flash is None:
            import flash_attn  # optional, and only where there is a GPU

            flash = flash_attn
        self._flash = flash

    def decodes(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables
    ) -> torch.Tensor:
        attended: torch.Tensor = self._flash.flash_attn_with_kvcache(
            q.unsqueeze(1),
            keys,
            values,
            cache_seqlens=tables.contexts[: len(q)],
            block_table=tables.pages[: len(q)],
            causal=True,
        )
        return attended.squeeze(1)

    def chunks(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables
    ) -> torch.Tensor:
        attended: torch.Tensor = self._flash.flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=tables.starts,
            cu_seqlens_k=tables.context_starts,
            max_seqlen_q=tables.max_length,
            max_seqlen_k=tables.max_chunk_context,
            causal=True,
            block_table=tables.pages[tables.num_decodes :],
        )
        return attended


class TorchVarlen:
    """torch's own FlashAttention for chunks, ours for decodes.

    torch ships FlashAttention 2 in every CUDA build and lets others replace it. Its split-KV writes
    wrong rows over pages (pytorch issue 194167), so chunks are never split and decodes, which need
    it, are computed by a kernel of ours. ``varlen`` and ``replacement`` are torch's functions.
    """

    name = "torch-varlen"

    def __init__(self, max_context: int, varlen: Any = None, replacement: Any = None) -> None:
        if varlen is None:
            from torch.nn.attention import current_flash_attention_impl
            from torch.nn.attention.varlen import varlen_attn

            varlen, replacement = varlen_attn, current_flash_attention_impl
        self._split = kernels.split_tokens(max_context)
        self._varlen, self._replacement = varlen, replacement

    def decodes(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables
    ) -> torch.Tensor:
        return kernels.attend_decodes(
            q,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            tables.contexts[: len(q)],
            tables.pages[: len(q)],
            self._split,
        )

    def chunks(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables
    ) -> torch.Tensor:
        n = tables.num_decodes
        # FlashAttention 2 wants the sums of keys beside the lengths that it goes by; 3 and 4 take
        # only one of the two.
        sums = tables.context_starts if self._replacement() is None else None
        attended: torch.Tensor = self._varlen(
            q,
            keys,
            values,
            tables.starts,
            sums,
            tables.max_length,
            tables.max_chunk_context,
            window_size=(-1, 0),  # causal, aligned to the last key
            enable_gqa=True,
            seqused_k=tables.contexts[n:],
            block_table=tables.pages[n:],
            num_splits=1,
        )
        return attended
