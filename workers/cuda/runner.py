"""The engine's executor on CUDA: one copy to the device, one launch for decode steps of a recorded
size, and one wait for the device at the end of each step.
"""

import torch

from kvtransfer.core.handle import KVLayout
from workers.batch import Batch, build
from workers.core.output import Token
from workers.core.plan import Chunk
from workers.core.request import Request, Sampling, Sequence
from workers.cuda.attention import CudaAttention, Tables
from workers.cuda.graphs import DecodeGraphs
from workers.cuda.model import CudaLlama
from workers.cuda.sampler import DeviceSampler
from workers.kvcache import KVCache
from workers.prompt_logprobs import asks_about_prompts
from workers.runner import ModelRunner
from workers.sampler import Sampler
from workers.upload import upload

HOST = torch.device("cpu")


class CudaRunner(ModelRunner):
    def __init__(
        self,
        model: CudaLlama,
        cache: KVCache,
        attention: CudaAttention,
        graphs: DecodeGraphs | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        super().__init__(model, cache, attention, sampler or DeviceSampler())
        self._plan_for, self._graphs = attention.plan_for, graphs

    @torch.inference_mode()
    def run(self, chunks: tuple[Chunk, ...]) -> dict[str, Token]:
        """Compute a step; the sampled token of each chunk that reaches its sequence's end."""
        self._sampler.constraints.expect(chunk.seq for chunk in chunks)
        batch = build(chunks, self.cache.layout.page_size, HOST)
        if len(batch.fresh_pages):
            self.cache.clear(*upload([batch.fresh_pages], self.model.device))
        if self._graphs is not None and self._graphs.fits(batch):
            logits = self._graphs.logits(batch)
        else:
            logits = self._eager(chunks, batch)
        seqs = [chunk.seq for chunk in chunks if chunk.samples]
        if not seqs:
            self._wait()
            return {}
        tokens = self._prompts.attach(seqs, self._sampler.sample(logits, seqs))
        return {seq.id: token for seq, token in zip(seqs, tokens, strict=True)}

    def _eager(self, chunks: tuple[Chunk, ...], batch: Batch) -> torch.Tensor:
        """float32 [num_sampled, vocab_size]."""
        tables = Tables.of(batch.attention)
        tokens, positions, rows, *tensors = upload(
            [batch.tokens, batch.positions, batch.sampled_rows, *tables.tensors],
            self.model.device,
        )
        plan = self._plan_for(tables.with_tensors(tensors))
        asked = None if asks_about_prompts(chunks) else rows
        hidden = self.model.forward(tokens, positions, self.cache, plan, asked)
        if asked is None:
            self._prompts.note(chunks, hidden, self.model.logits)
            hidden = hidden[rows]
        if not len(rows):
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        return self.model.logits(hidden)

    def _wait(self) -> None:
        """Even if no token is wanted: pages freed after a step may be written by a transfer, which
        another stream does, and the time that a step took must be known."""
        if self.model.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def largest_step_bytes(
    model: CudaLlama, attention: CudaAttention, layout: KVLayout, max_tokens: int, max_seqs: int
) -> int:
    """Memory that a step takes beside weights and pages, by running the largest one.

    What kernels compile and libraries set up at first use is out of the way with it, too.
    """
    device = model.device
    prompt = (0,) * min(max_tokens, model.config.max_model_len)
    cache = KVCache(layout, -(-len(prompt) // layout.page_size), device)
    seq = Sequence(Request("warm-up", prompt, Sampling(temperature=1.0, top_p=0.9)))
    seq.pages = list(range(cache.num_pages))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    CudaRunner(model, cache, attention).run((Chunk(seq, 0, len(prompt)),))
    with torch.inference_mode():
        hidden = torch.zeros(max_seqs, model.config.hidden_size, dtype=model.dtype, device=device)
        DeviceSampler().sample(model.logits(hidden), [seq] * max_seqs)
    peak = torch.cuda.max_memory_allocated(device) - before
    del cache, hidden
    torch.cuda.empty_cache()
    return peak
