"""The memory that holds keys and values: one tensor of pages, and a view of it per layer.

Which page belongs to whom is the page pool's business.
"""

import os

import torch

from kvtransfer.core.handle import KVLayout
from workers.memory import use_huge_pages
from workers.models.config import ModelError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CPU_SHARE = 1 / 8  # of the memory that is available when the worker starts
CPU_CONTEXTS = 8  # more full-length contexts than this are not worth memory on a CPU
CUDA_SHARE = 0.9  # of what weights and steps leave free
SPARE_STEP_BYTES = 1 << 30  # for steps whose need was not measured


class KVCache:
    """``pool`` is ``[page, layer, kv_head, 2, page_size, head_dim]``: one page, one record."""

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        self.layout, self.num_pages = layout, num_pages
        shape = (
            num_pages,
            layout.num_layers,
            layout.num_kv_heads,
            2,
            layout.page_size,
            layout.head_dim,
        )
        self.pool = torch.empty(shape, dtype=DTYPES[layout.dtype], device=device)
        use_huge_pages(self.pool)
        self.pool.zero_()
        self.keys = [self.pool[:, i, :, 0] for i in range(layout.num_layers)]
        self.values = [self.pool[:, i, :, 1] for i in range(layout.num_layers)]
        # keys[layer] and values[layer] are views [page, kv_head, page_size, head_dim]

    def clear(self, pages: torch.Tensor) -> None:
        """Zero pages that a sequence is about to fill only in part.

        Attention multiplies what lies behind a context by a weight of zero, so it has to be finite.
        """
        if len(pages):
            self.pool.index_fill_(0, pages, 0)


def num_pages_for(layout: KVLayout, num_bytes: int) -> int:
    return num_bytes // layout.page_bytes


def pages_beside(layout: KVLayout, free_bytes: int, step_bytes: int) -> int:
    """As many pages as a GPU holds beside the largest step. What is left over is for graphs and
    for memory that is lost between allocations."""
    return num_pages_for(layout, max(0, int((free_bytes - step_bytes) * CUDA_SHARE)))


def default_num_pages(layout: KVLayout, max_model_len: int, device: torch.device) -> int:
    """As many pages as this machine should give one worker."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return pages_beside(layout, free, SPARE_STEP_BYTES)
    per_context = -(-max_model_len // layout.page_size)
    fitting = num_pages_for(layout, int(available_bytes() * CPU_SHARE))
    return min(fitting, CPU_CONTEXTS * per_context)


def make_cache(layout: KVLayout, num_pages: int, device: torch.device) -> KVCache:
    """ModelError when there is no room."""
    size = f"{layout.page_bytes / 2**20:.1f} MiB"
    if num_pages < 1:
        raise ModelError(f"{num_pages=}: at least one KV page of {size} is needed")
    try:
        return KVCache(layout, num_pages, device)
    except RuntimeError:
        raise ModelError(f"no memory for {num_pages} KV pages of {size}: ask for fewer") from None


def available_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
