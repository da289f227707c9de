"""Large arrays in huge pages, where the system has them."""

import ctypes
import mmap

import torch

PAGE_BYTES = mmap.PAGESIZE


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages, before the tensor is first written: later it has no effect.

    Less time goes into finding addresses. Best effort: without support nothing happens.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu":
        return
    begin = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    num_bytes = tensor.data_ptr() + tensor.nbytes - begin
    if num_bytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), advice)
