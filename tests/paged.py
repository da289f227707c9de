"""Random paged batches, and attention over them in float64 as the reference."""

from dataclasses import dataclass

import torch

from kvtransfer.core.handle import KVLayout
from workers.batch import AttentionMetadata, Span
from workers.kvcache import KVCache

NUM_LAYERS = 2


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16


@dataclass
class PagedBatch:
    """q, k, v of one step, and a cache that holds everything before it."""

    cache: KVCache
    metadata: AttentionMetadata
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    history: list[torch.Tensor]  # per sequence, [context, 2, kv_heads, head_dim]

    def reference(self) -> torch.Tensor:
        """float64, one row at a time."""
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for span, past in zip(self.metadata.spans, self.history, strict=True):
            group = self.q.shape[1] // past.shape[2]
            keys, values = past.double().repeat_interleave(group, dim=2).unbind(1)
            for i in range(span.length):
                seen = span.context - span.length + i + 1
                q = self.q[span.start + i].double()
                scores = torch.einsum("hd,shd->hs", q, keys[:seen]) * q.shape[-1] ** -0.5
                out[span.start + i] = torch.einsum("hs,shd->hd", scores.softmax(-1), values[:seen])
        return out


def paged_batch(
    shape: Shape,
    sizes: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layer: int = 1,
) -> PagedBatch:
    """``sizes``: (rows, context) of each sequence. Pages that nobody owns are full of NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator).to(dtype)

    size, heads = shape.page_size, shape.num_kv_heads
    num_pages = [-(-context // size) for _, context in sizes]
    order = torch.randperm(sum(num_pages) + 3, generator=generator).tolist()
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout("test", NUM_LAYERS, heads, shape.head_dim, size, name)
    cache = KVCache(layout, len(order), torch.device("cpu"))
    cache.pool.fill_(torch.nan)
    spans, history, rows = [], [], []
    for (length, context), count in zip(sizes, num_pages, strict=True):
        pages, order = order[:count], order[count:]
        past = random(context, 2, heads, shape.head_dim)
        cache.pool[pages] = 0
        for position in range(context - length):  # what earlier steps stored
            page, offset = pages[position // size], position % size
            cache.pool[page, layer, :, :, offset] = past[position].transpose(0, 1)
        spans.append(Span(sum(len(r) for r in rows), length, context, pages))
        history.append(past)
        rows.append(past[context - length :])
    new = torch.cat(rows)
    q = random(len(new), shape.num_heads, shape.head_dim)
    metadata = AttentionMetadata(tuple(spans), size, torch.device("cpu"))
    return PagedBatch(cache, metadata, q, new[:, 0], new[:, 1], history)
