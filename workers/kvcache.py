"""The memory that holds keys and values: one tensor of pages, and a view of it per layer.

Which page belongs to whom is the page pool's business.
"""

import os

import torch

from kvtransfer.core.handle import KVLayout
from workers.memory import use_huge_pages

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CPU_SHARE = 1 / 8  # of the memory that is available when the worker starts
CPU_CONTEXTS = 8  # more full-length contexts than this are not worth memory on a CPU
CUDA_SHARE = 0.9  # of what is free once the weights are loaded


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
        self.pool.index_fill_(0, pages, 0)


def num_pages_for(layout: KVLayout, num_bytes: int) -> int:
    return num_bytes // layout.page_bytes


def default_num_pages(layout: KVLayout, max_model_len: int, device: torch.device) -> int:
    """As many pages as this machine should give one worker."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return num_pages_for(layout, int(free * CUDA_SHARE))
    per_context = -(-max_model_len // layout.page_size)
    fitting = num_pages_for(layout, int(available_bytes() * CPU_SHARE))
    return min(fitting, CPU_CONTEXTS * per_context)


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
