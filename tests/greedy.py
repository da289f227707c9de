"""Drives a model runner without an engine, and transformers as the reference."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from workers.batch import build
from workers.core.plan import Chunk
from workers.core.request import Phase, Request, Sampling, Sequence
from workers.runner import ModelRunner


def sequence(
    name: str, prompt: Iterable[int], pages: Iterable[int] = (), **sampling: Any
) -> Sequence:
    settings = {"max_tokens": 16, "temperature": 0.0, **sampling}
    seq = Sequence(Request(name, tuple(prompt), Sampling(**settings)))
    seq.pages = list(pages)
    return seq


def advance(runner: ModelRunner, chunks: Iterable[Chunk]) -> None:
    """Run one step and commit it."""
    chunks = tuple(chunks)
    tokens = runner.run(chunks)
    for chunk in chunks:
        chunk.seq.num_computed += chunk.length
        if token := tokens.get(chunk.seq.id):
            chunk.seq.output.append(token.id)
            chunk.seq.phase = Phase.DECODE


def generate(runner: ModelRunner, seqs: Iterable[Sequence], budget: int = 1 << 20) -> None:
    """Run all to max_tokens: prompts one after another in chunks, beside everybody's decodes."""
    waiting = list(seqs)
    decoding: list[Sequence] = []
    while waiting or decoding:
        chunks = [Chunk(seq, seq.num_computed, 1) for seq in decoding]
        if waiting:
            length = min(budget, waiting[0].num_pending)
            chunks.append(Chunk(waiting[0], waiting[0].num_computed, length))
        advance(runner, chunks)
        if waiting and not waiting[0].num_pending - 1:
            decoding.append(waiting.pop(0))
        decoding = [s for s in decoding if len(s.output) < s.request.sampling.max_tokens]


def last_logits(runner: ModelRunner, tokens: list[int], lengths: list[int]) -> torch.Tensor:
    """The last position's logits, computed in chunks of these lengths."""
    page_size = runner.cache.layout.page_size
    seq = sequence("a", tokens, range(-(-len(tokens) // page_size)))
    start, hidden = 0, torch.empty(0)
    with torch.inference_mode():
        for length in lengths:
            batch = build((Chunk(seq, start, length),), page_size, runner.model.device)
            plan = runner.attention.plan(batch.attention, runner.model.dtype)
            hidden = runner.model.forward(batch.tokens, batch.positions, runner.cache, plan)
            start += length
        assert start == len(tokens)
        return runner.model.logits(hidden[-1:])[0]


class Reference:
    """transformers in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def logits(self, tokens: Iterable[int]) -> torch.Tensor:
        """[num_tokens, vocab_size]."""
        return self._model(torch.tensor([list(tokens)])).logits[0]

    @torch.inference_mode()
    def greedy(self, prompt: Iterable[int], num_tokens: int) -> list[int]:
        """The most likely tokens; end tokens do not end it."""
        tokens = torch.tensor([list(prompt)])
        output = self._model.generate(
            tokens, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        return output[0, tokens.shape[1] :].tolist()
