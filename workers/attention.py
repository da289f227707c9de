"""Attention over paged keys and values, for one mixed batch of decodes and prompt chunks.

A backend knows pages, lengths and heads; it knows nothing of models, requests or schedules.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from workers.batch import AttentionMetadata, Span
from workers.kvcache import KVCache

PADDED_CONTEXT = 256  # decodes up to this long share one padded call, longer ones by 2x classes


class AttentionPlan(Protocol):
    """One step's attention, the same for all layers."""

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, layer: int) -> None:
        """Write this step's keys and values, [num_tokens, kv_heads, head_dim], to their pages."""
        ...

    def forward(self, q: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        """Causal attention of q, [num_tokens, heads, head_dim], to each sequence's context.

        The step's own keys and values are stored already. The result has q's shape.
        """
        ...


class AttentionBackend(Protocol):
    name: str
    page_size_multiple: int  # page sizes must be multiples of this

    def plan(self, metadata: AttentionMetadata, dtype: torch.dtype) -> AttentionPlan:
        """Prepare one step on queries of this dtype."""
        ...


class TorchAttention:
    """Gathers pages and calls torch's own attention. Runs everywhere; the reference for others."""

    name = "torch"
    page_size_multiple = 1

    def plan(self, metadata: AttentionMetadata, dtype: torch.dtype) -> AttentionPlan:
        decodes = [span for span in metadata.spans if span.length == 1]
        return _TorchPlan(
            metadata,
            [_padded(group, metadata, dtype) for group in _by_length(decodes)],
            [_single(span, metadata, dtype) for span in metadata.spans if span.length > 1],
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences attended to in one call."""

    rows: torch.Tensor  # int64 [n * num_q]: rows of q
    pages: torch.Tensor  # int64 [n, num_pages]
    max_context: int
    mask: torch.Tensor | None  # added to scores [n, heads, num_q, max_context]


class _TorchPlan:
    def __init__(
        self, metadata: AttentionMetadata, decodes: list[_Group], chunks: list[_Group]
    ) -> None:
        self._metadata, self._decodes, self._chunks = metadata, decodes, chunks

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, layer: int) -> None:
        _store(k, v, cache, layer, self._metadata)

    def forward(self, q: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        out = torch.empty_like(q)
        for group in self._decodes:
            num_seqs, (num_heads, head_dim) = len(group.pages), q.shape[1:]
            k, v = _gather(cache, layer, group)
            rows = q[group.rows].view(num_seqs, k.shape[1], num_heads // k.shape[1], head_dim)
            attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=group.mask)
            out[group.rows] = attended.reshape(num_seqs, num_heads, head_dim)
        for group in self._chunks:
            k, v = _gather(cache, layer, group)
            out[group.rows] = F.scaled_dot_product_attention(
                q[group.rows].transpose(0, 1).unsqueeze(0),
                k,
                v,
                attn_mask=group.mask,
                is_causal=group.mask is None,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out


def _store(
    k: torch.Tensor, v: torch.Tensor, cache: KVCache, layer: int, metadata: AttentionMetadata
) -> None:
    pages, offsets = metadata.slots
    cache.keys[layer][pages, :, offsets] = k
    cache.values[layer][pages, :, offsets] = v


def _gather(cache: KVCache, layer: int, group: _Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, kv_heads, max_context, head_dim] of a group.

    Selecting whole rows [page_size * head_dim] of the flat pool is 5 to 10 times faster than
    indexing its strided views.
    """
    layout = cache.layout
    num_heads, row = layout.num_kv_heads, layout.page_size * layout.head_dim
    flat = cache.pool.view(-1, row)
    heads = torch.arange(num_heads, device=flat.device)
    index = (group.pages[:, None, :] * layout.num_layers + layer) * num_heads + heads[:, None]
    shape = (len(group.pages), num_heads, -1, layout.head_dim)
    keys, values = (
        flat.index_select(0, (index * 2 + i).view(-1)).view(shape)[:, :, : group.max_context]
        for i in (0, 1)
    )
    return keys, values


def _by_length(decodes: list[Span]) -> list[list[Span]]:
    """Groups in which padding to the longest at most doubles the work."""
    groups: dict[int, list[Span]] = {}
    for span in decodes:
        size = max(PADDED_CONTEXT, 1 << (span.context - 1).bit_length())
        groups.setdefault(size, []).append(span)
    return list(groups.values())


def _padded(group: list[Span], metadata: AttentionMetadata, dtype: torch.dtype) -> _Group:
    """Decodes side by side. Behind its own pages a sequence repeats its first, masked out."""
    device = metadata.device
    width = max(len(span.pages) for span in group)
    pages = [span.pages + span.pages[:1] * (width - len(span.pages)) for span in group]
    contexts = torch.tensor([span.context for span in group], device=device)
    longest = max(span.context for span in group)
    hidden = torch.arange(longest, device=device) >= contexts[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
    return _Group(
        rows=torch.tensor([span.start for span in group], device=device),
        pages=torch.tensor(pages, device=device),
        max_context=longest,
        mask=mask[:, None, None, :],
    )


def _single(span: Span, metadata: AttentionMetadata, dtype: torch.dtype) -> _Group:
    """One chunk. Without a context before it, plain causal attention needs no mask."""
    device = metadata.device
    mask = None
    if span.context > span.length:
        mask = torch.full((span.length, span.context), -math.inf, dtype=dtype, device=device)
        mask = mask.triu_(span.context - span.length + 1)[None, None]
    return _Group(
        rows=torch.arange(span.start, span.start + span.length, device=device),
        pages=torch.tensor([span.pages], device=device),
        max_context=span.context,
        mask=mask,
    )
