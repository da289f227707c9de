"""Runs the steps that the scheduler plans on the real model: the engine's executor.

It knows batches and tensors, and of a sequence only its tokens and pages.
"""

import logging
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.attention import AttentionBackend, TorchAttention
from workers.batch import build
from workers.constraints import Constraints
from workers.core.output import Token
from workers.core.plan import Chunk
from workers.cuda.sampler import DeviceSampler
from workers.grammar import Grammars
from workers.kvcache import DTYPES, KVCache, default_num_pages, make_cache
from workers.models.config import ModelConfig, ModelError
from workers.models.llama import Llama
from workers.native.attention import NativeAttention
from workers.native.library import Kernels, kernels
from workers.native.model import NativeLlama, is_supported
from workers.prompt_logprobs import PromptLogprobs, asks_about_prompts
from workers.sampler import Sampler
from workers.weights import Checkpoint

logger = logging.getLogger(__name__)

PAGE_SIZE = 16
CUDA_MAX_TOKENS = 2048  # of one step, where nothing else is said


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step to be ready for."""

    max_tokens: int
    max_seqs: int
    max_context: int


class ModelRunner:
    def __init__(
        self,
        model: Llama | NativeLlama,
        cache: KVCache,
        attention: AttentionBackend,
        sampler: Sampler | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.config = model.config
        self.vocab_size = model.config.vocab_size
        self.attention, self._sampler = attention, sampler or Sampler()
        self._prompts = PromptLogprobs()

    @torch.inference_mode()
    def run(self, chunks: tuple[Chunk, ...]) -> dict[str, Token]:
        """Compute a step; the sampled token of each chunk that reaches its sequence's end."""
        page_size = self.cache.layout.page_size
        self._sampler.constraints.expect(chunk.seq for chunk in chunks)
        batch = build(chunks, page_size, self.model.device)
        self.cache.clear(batch.fresh_pages)
        plan = self.attention.plan(batch.attention, self.model.dtype)
        rows = None if asks_about_prompts(chunks) else batch.sampled_rows
        hidden = self.model.forward(batch.tokens, batch.positions, self.cache, plan, rows)
        if rows is None:
            self._prompts.note(chunks, hidden, self.model.logits)
            hidden = hidden[batch.sampled_rows]
        seqs = [chunk.seq for chunk in chunks if chunk.samples]
        if not seqs:
            return {}
        logits = self.model.logits(hidden)
        tokens = self._prompts.attach(seqs, self._sampler.sample(logits, seqs))
        return {seq.id: token for seq, token in zip(seqs, tokens, strict=True)}

    def forget(self, request_id: str) -> None:
        """The sequence left this worker."""
        self._sampler.forget(request_id)
        self._prompts.forget(request_id)


def load_runner(
    folder: Path,
    dtype: str = "auto",
    device: str = "auto",
    page_size: int | None = None,
    num_pages: int | None = None,
    threads: int | None = None,
    max_model_len: int | None = None,
    isa: str | None = None,
    max_tokens: int | None = None,
    max_seqs: int = 64,
) -> ModelRunner:
    """Load a model folder and make room for its KV.

    ``num_pages`` None: as many pages as the machine should give. ``page_size`` None: 16, or the
    least that the attention backend takes. ``isa`` None: the best that this CPU has, see
    ``workers.native.library.kernels``. ``max_tokens`` and ``max_seqs`` are of one step; a GPU keeps
    memory for them.
    ModelError says in one line why the model cannot be served.
    """
    if threads:
        torch.set_num_threads(threads)
    where = find_device(device)
    config = ModelConfig.load(folder)
    precision = resolve_dtype(dtype, where)
    longest = min(max_model_len or config.max_model_len, config.max_model_len)
    weights = Checkpoint(folder)
    constraints = Constraints(Grammars.load(folder, config.vocab_size, config.eos_ids))
    if where.type == "cuda":
        limits = StepLimits(max_tokens or CUDA_MAX_TOKENS, max_seqs, longest)
        runner = _cuda_runner(
            config, weights, precision, where, page_size, num_pages, limits, constraints
        )
        if runner is not None:
            return runner
    native = _native(config, DTYPES[precision], where, isa)
    attention = NativeAttention(native) if native else TorchAttention()
    layout = config.kv_layout(checked_page_size(page_size, attention), precision)
    model = (
        NativeLlama(config, weights, DTYPES[precision], native)
        if native
        else Llama(config, weights, DTYPES[precision], where)
    )
    if num_pages is None:
        num_pages = default_num_pages(layout, longest, where)
    sampler = _sampler(constraints, where, native)
    return ModelRunner(model, make_cache(layout, num_pages, where), attention, sampler)


def _native(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, isa: str | None
) -> Kernels | None:
    """The kernels that will compute this model, if any do."""
    return kernels(isa) if device.type == "cpu" and is_supported(config, dtype) else None


def _sampler(constraints: Constraints, device: torch.device, native: Kernels | None) -> Sampler:
    if device.type == "cuda":
        return DeviceSampler(constraints)
    return Sampler(constraints, native.argmax) if native else Sampler(constraints)


def _cuda_runner(
    config: ModelConfig,
    weights: Checkpoint,
    precision: str,
    device: torch.device,
    page_size: int | None,
    num_pages: int | None,
    limits: StepLimits,
    constraints: Constraints,
) -> ModelRunner | None:
    """None, with the reason in the log, where the fast kernels cannot run."""
    try:
        from workers.cuda import start  # needs Triton, which torch's CUDA builds bring on Linux
    except ImportError as error:
        logger.warning("attention: torch SDPA, which is slow on a GPU (%s)", error)
        return None
    attention = start.choose_attention(config, DTYPES[precision], device, limits.max_context)
    if attention is None:
        return None
    layout = config.kv_layout(checked_page_size(page_size, attention), precision)
    sampler = DeviceSampler(constraints)
    return start.make_runner(config, weights, attention, layout, device, limits, num_pages, sampler)


def checked_page_size(asked: int | None, attention: AttentionBackend) -> int:
    multiple = attention.page_size_multiple
    page_size = max(PAGE_SIZE, multiple) if asked is None else asked
    if page_size < 1 or page_size % multiple:
        raise ModelError(
            f"page_size: {page_size}, but {attention.name} takes only multiples of {multiple}"
        )
    return page_size


def resolve_dtype(name: str, device: torch.device) -> str:
    """ "auto" is bfloat16 where the device computes in it, float32 elsewhere."""
    if name in DTYPES:
        return name
    if name != "auto":
        raise ModelError(f"dtype {name!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if has_bfloat16 else "float16"
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return "bfloat16" if fast else "float32"


def find_device(name: str) -> torch.device:
    """ModelError when this machine has none of that name."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"device {name!r} is not known; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {name!r}: this torch sees no CUDA device")
    return device


def device_name(device: torch.device) -> str:
    """What is really there: two machines whose steps take the same time have the same name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} {torch.cpu.get_capabilities()}"
