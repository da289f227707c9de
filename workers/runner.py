"""Runs the steps that the scheduler plans on the real model: the engine's executor.

It knows batches and tensors, and of a sequence only its tokens and pages.
"""

from pathlib import Path

import torch

from kvtransfer.core.handle import KVLayout
from workers.attention import AttentionBackend, default_attention
from workers.batch import build
from workers.constraints import Constraints
from workers.core.output import Token
from workers.core.plan import Chunk
from workers.grammar import Grammars
from workers.kvcache import DTYPES, KVCache, default_num_pages
from workers.models.config import ModelConfig, ModelError
from workers.models.llama import Llama
from workers.native.attention import NativeAttention
from workers.native.library import Kernels, kernels
from workers.native.model import NativeLlama, is_supported
from workers.sampler import Sampler
from workers.weights import Checkpoint

PAGE_SIZE = 16


class ModelRunner:
    def __init__(
        self,
        model: Llama | NativeLlama,
        cache: KVCache,
        attention: AttentionBackend,
        grammars: Grammars | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.config = model.config
        self.vocab_size = model.config.vocab_size
        self.attention, self._sampler = attention, Sampler(Constraints(grammars))

    @torch.inference_mode()
    def run(self, chunks: tuple[Chunk, ...]) -> dict[str, Token]:
        """Compute a step; the sampled token of each chunk that reaches its sequence's end."""
        page_size = self.cache.layout.page_size
        self._sampler.constraints.expect(chunk.seq for chunk in chunks)
        batch = build(chunks, page_size, self.model.device)
        self.cache.clear(batch.fresh_pages)
        plan = self.attention.plan(batch.attention, self.model.dtype)
        hidden = self.model.forward(batch.tokens, batch.positions, self.cache, plan)
        seqs = [chunk.seq for chunk in chunks if chunk.samples]
        if not seqs:
            return {}
        logits = self.model.logits(hidden[batch.sampled_rows])
        tokens = self._sampler.sample(logits, seqs)
        return {seq.id: token for seq, token in zip(seqs, tokens, strict=True)}

    def forget(self, request_id: str) -> None:
        """The sequence left this worker."""
        self._sampler.forget(request_id)


def load_runner(
    folder: Path,
    dtype: str = "auto",
    device: str = "auto",
    page_size: int | None = None,
    num_pages: int | None = None,
    threads: int | None = None,
    max_model_len: int | None = None,
    isa: str | None = None,
) -> ModelRunner:
    """Load a model folder and make room for its KV.

    ``num_pages`` None: as many pages as the machine should give. ``page_size`` None: 16, or the
    least that the attention backend takes. ``isa`` None: the best that this CPU has, see
    ``workers.native.library.kernels``.
    ModelError says in one line why the model cannot be served.
    """
    if threads:
        torch.set_num_threads(threads)
    where = _device(device)
    config = ModelConfig.load(folder)
    precision = resolve_dtype(dtype, where)
    native = _native(config, DTYPES[precision], where, isa)
    attention = NativeAttention(native) if native else default_attention(where, DTYPES[precision])
    multiple = attention.page_size_multiple
    page_size = max(PAGE_SIZE, multiple) if page_size is None else page_size
    if page_size < 1 or page_size % multiple:
        raise ModelError(f"{page_size=}, but {attention.name} takes only multiples of {multiple}")
    model = (
        NativeLlama(config, Checkpoint(folder), DTYPES[precision], native)
        if native
        else Llama(config, Checkpoint(folder), DTYPES[precision], where)
    )
    longest = min(max_model_len or config.max_model_len, config.max_model_len)
    cache = _cache(config.kv_layout(page_size, precision), num_pages, longest, where)
    grammars = Grammars.load(folder, config.vocab_size, config.eos_ids)
    return ModelRunner(model, cache, attention, grammars)


def _native(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, isa: str | None
) -> Kernels | None:
    """The kernels that will compute this model, if any do."""
    return kernels(isa) if device.type == "cpu" and is_supported(config, dtype) else None


def _cache(
    layout: KVLayout, num_pages: int | None, max_model_len: int, device: torch.device
) -> KVCache:
    if num_pages is None:
        num_pages = default_num_pages(layout, max_model_len, device)
    size = f"{layout.page_bytes / 2**20:.1f} MiB"
    if num_pages < 1:
        raise ModelError(f"{num_pages=}: at least one KV page of {size} is needed")
    try:
        return KVCache(layout, num_pages, device)
    except RuntimeError:
        raise ModelError(f"no memory for {num_pages} KV pages of {size}: ask for fewer") from None


def resolve_dtype(name: str, device: torch.device) -> str:
    """ "auto" is bfloat16 where the device computes in it, float32 elsewhere."""
    if name in DTYPES:
        return name
    if name != "auto":
        raise ModelError(f"dtype {name!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return "bfloat16" if fast else "float32"


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"device {name!r} is not known; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name!r}: this torch sees no CUDA device")
    return device
