"""One step's input as tensors, built once on the host and shared by all layers."""

from dataclasses import dataclass
from functools import cached_property

import torch

from workers.core.plan import Chunk


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part in a step, in host numbers."""

    start: int  # first row of this step's tokens
    length: int  # rows, this step's tokens
    context: int  # tokens attended to by the last row, this step's included
    pages: list[int]  # exactly those that hold the context


@dataclass(frozen=True)
class AttentionMetadata:
    """Where each row's keys and values go and come from.

    Sequences are ordered: ``num_decodes`` of one row each, then chunks. A chunk that happens to
    have one row counts as a decode if no longer chunk stands before it.
    """

    spans: tuple[Span, ...]
    page_size: int
    device: torch.device

    @cached_property
    def num_decodes(self) -> int:
        for i, span in enumerate(self.spans):
            if span.length > 1:
                return i
        return len(self.spans)

    @cached_property
    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(page, offset in it) of every row, int64 [num_tokens] each."""
        slots = [
            (span.pages[position // self.page_size], position % self.page_size)
            for span in self.spans
            for position in range(span.context - span.length, span.context)
        ]
        pages, offsets = torch.tensor(slots, dtype=torch.int64).T.contiguous().to(self.device)
        return pages, offsets

    @cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        """int32 [num_seqs + 1]: the first row of each sequence, and the number of rows."""
        ends = [span.start + span.length for span in self.spans]
        return torch.tensor([0, *ends], dtype=torch.int32, device=self.device)

    @cached_property
    def seqused_k(self) -> torch.Tensor:
        """int32 [num_seqs]: context lengths."""
        lengths = [span.context for span in self.spans]
        return torch.tensor(lengths, dtype=torch.int32, device=self.device)

    @cached_property
    def page_table(self) -> torch.Tensor:
        """int32 [num_seqs, max_pages]; behind a sequence's pages its first one is repeated."""
        width = max(len(span.pages) for span in self.spans)
        rows = [span.pages + span.pages[:1] * (width - len(span.pages)) for span in self.spans]
        return torch.tensor(rows, dtype=torch.int32, device=self.device)


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    sampled_rows: torch.Tensor  # int64 [num_sampled]: last rows of the chunks that sample
    fresh_pages: torch.Tensor  # int64: pages first used in this step and not filled by it
    attention: AttentionMetadata


def build(chunks: tuple[Chunk, ...], page_size: int, device: torch.device) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    fresh: list[int] = []
    spans: list[Span] = []
    for chunk in chunks:
        stop = chunk.start + chunk.length
        num_pages = -(-stop // page_size)
        pages = chunk.seq.pages[:num_pages]
        assert len(pages) == num_pages, f"{chunk.seq.id}: {len(pages)} pages for {stop} tokens"
        spans.append(Span(len(tokens), chunk.length, stop, pages))
        tokens += chunk.seq.tokens(chunk.start, stop)
        positions += range(chunk.start, stop)
        if chunk.samples:
            sampled.append(len(tokens) - 1)
        last_page_start = (num_pages - 1) * page_size
        if stop % page_size and chunk.start <= last_page_start:
            fresh.append(pages[-1])
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        sampled_rows=torch.tensor(sampled, dtype=torch.int64, device=device),
        fresh_pages=torch.tensor(fresh, dtype=torch.int64, device=device),
        attention=AttentionMetadata(tuple(spans), page_size, device),
    )
