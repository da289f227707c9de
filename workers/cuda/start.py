"""Puts the CUDA path together: which kernels, how many pages, which graphs.

Kernels are believed only after they computed a small batch right on this device, so a library that
is broken or of another version costs speed and a line in the log, never wrong tokens.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from kvtransfer.core.handle import KVLayout
from workers.attention import AttentionBackend, TorchAttention
from workers.batch import AttentionMetadata, Span
from workers.cuda.attention import MAX_HEAD_DIM, CudaAttention, FlashAttn, Library, TorchVarlen
from workers.cuda.graphs import record_decodes
from workers.cuda.model import CudaLlama
from workers.cuda.runner import CudaRunner, largest_step_bytes
from workers.kvcache import DTYPES, KVCache, make_cache, pages_beside
from workers.models.config import ModelConfig
from workers.runner import StepLimits
from workers.sampler import Sampler
from workers.weights import Checkpoint

logger = logging.getLogger(__name__)

NARROW = (torch.bfloat16, torch.float16)
TOLERANCE = 2e-2  # relative, of 16-bit attention against float32
# (rows, context) of the sequences that are tried: page edges, one and several splits, a chunk
# behind a context and one without.
TRIAL = ((1, 1), (1, 256), (1, 257), (1, 700), (70, 300), (33, 33))
TRIAL_PAGE = 256


def choose_attention(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, max_context: int
) -> CudaAttention | None:
    """The first library whose kernels are there and right; None, with the reasons in the log."""
    libraries: dict[str, Callable[[], Library]] = {
        "flash-attn": FlashAttn,
        "torch-varlen": lambda: TorchVarlen(max_context),
    }
    return first_right(libraries, config, dtype, device)


def first_right(
    libraries: dict[str, Callable[[], Library]],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> CudaAttention | None:
    unfit = _unfit(config, dtype)
    reasons = [unfit] if unfit else []
    for name, library in libraries.items() if not unfit else ():
        try:
            attention = CudaAttention(library())
            wrong = wrong_result(attention, config, dtype, device)
        except Exception as error:  # of whatever kind: the next library is tried
            wrong = " ".join(f"{type(error).__name__}: {error}".split())
        if wrong is None:
            logger.info("attention: %s", name)
            return attention
        reasons.append(f"{name}: {wrong}")
    logger.warning("attention: torch SDPA, which is slow on a GPU (%s)", "; ".join(reasons))
    return None


def _unfit(config: ModelConfig, dtype: torch.dtype) -> str | None:
    if dtype not in NARROW:
        return f"{str(dtype).removeprefix('torch.')}: the fast kernels compute in 16 bits"
    if config.head_dim > MAX_HEAD_DIM or config.head_dim % 8:
        return f"head_dim {config.head_dim}: multiples of 8 up to {MAX_HEAD_DIM} are supported"
    return None


def wrong_result(
    attention: AttentionBackend, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What is wrong with a backend's result on a small batch; None if it is right."""
    spans, first_row, first_page = [], 0, 0
    for length, context in TRIAL:
        count = -(-context // TRIAL_PAGE)
        pages = list(range(first_page + count - 1, first_page - 1, -1))
        spans.append(Span(first_row, length, context, pages))
        first_row, first_page = first_row + length, first_page + count
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    layout = KVLayout("trial", 2, kv_heads, head_dim, TRIAL_PAGE, str(dtype).removeprefix("torch."))
    cache = KVCache(layout, first_page, device)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=generator))
    rows = torch.randn(first_row, heads + 2 * kv_heads, head_dim, generator=generator)
    q, k, v = torch.split(rows.to(device, dtype), [heads, kv_heads, kv_heads], dim=1)
    metadata = AttentionMetadata(tuple(spans), TRIAL_PAGE, device)
    plan = attention.plan(metadata, dtype)
    plan.store(k, v, cache, 1)
    result = plan.forward(q.contiguous(), cache, 1).float()
    wide = KVCache(replace(layout, dtype="float32"), first_page, device)
    wide.pool.copy_(cache.pool)
    expected = TorchAttention().plan(metadata, torch.float32).forward(q.float(), wide, 1)
    error = float((result - expected).norm() / expected.norm())
    return None if error < TOLERANCE else f"its result is off by {error:.2g}"


def make_runner(
    config: ModelConfig,
    weights: Checkpoint,
    attention: CudaAttention,
    layout: KVLayout,
    device: torch.device,
    limits: StepLimits,
    num_pages: int | None,
    sampler: Sampler | None = None,
) -> CudaRunner:
    """Weights, then pages in the memory that steps leave free, then graphs."""
    model = CudaLlama(config, weights, DTYPES[layout.dtype], device)
    needed = largest_step_bytes(model, attention, layout, limits.max_tokens, limits.max_seqs)
    if num_pages is None:
        free, _ = torch.cuda.mem_get_info(device)
        num_pages = pages_beside(layout, free, needed)
    cache = make_cache(layout, num_pages, device)
    max_pages = -(-limits.max_context // layout.page_size)
    graphs = record_decodes(model, cache, attention, max_pages, limits.max_seqs)
    return CudaRunner(model, cache, attention, graphs, sampler)
