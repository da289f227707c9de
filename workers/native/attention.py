"""Attention by the native kernels, for any model: one more attention backend."""

import torch

from workers.batch import AttentionMetadata
from workers.kvcache import KVCache
from workers.native.library import Kernels, PagedBatch


class NativeAttention:
    name = "native"
    page_size_multiple = 1

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def plan(self, metadata: AttentionMetadata, dtype: torch.dtype) -> "NativePlan":
        return NativePlan(self._kernels, metadata)


class NativePlan:
    def __init__(self, kernels: Kernels, metadata: AttentionMetadata) -> None:
        self._kernels, self._metadata = kernels, metadata
        self.batch = PagedBatch(metadata)

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, layer: int) -> None:
        pages, offsets = self._metadata.slots
        cache.keys[layer][pages, :, offsets] = k
        cache.values[layer][pages, :, offsets] = v

    def forward(self, q: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        return self._kernels.attention(q, cache, layer, self.batch)
