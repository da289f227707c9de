"""Tokens that a request rules out: all but a list, the ends of bad words, what a grammar forbids.

Grammars are compiled on a thread of their own while the prompt is computed; the step that needs one
waits for it, and for nothing else.
"""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from workers.core.request import Sampling, Sequence
from workers.grammar import Grammars, Matcher
from workers.upload import upload

COMPILE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class Constraints:
    """Of the requests on one worker. All calls come from the engine's thread."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._matchers: dict[str, Future[Matcher]] = {}
        self._thread = ThreadPoolExecutor(1, "grammar")

    def expect(self, seqs: Iterable[Sequence]) -> None:
        """Begin to compile what these sequences will need."""
        for seq in seqs:
            grammar = seq.request.sampling.grammar
            if grammar and self._grammars is not None and seq.id not in self._matchers:
                self._matchers[seq.id] = self._thread.submit(self._grammars.matcher, grammar)

    def forget(self, request_id: str) -> None:
        future = self._matchers.pop(request_id, None)
        if future is not None:
            future.cancel()

    def apply(self, logits: torch.Tensor, seq: Sequence) -> None:
        """In place: minus infinity for what must not come next. Something is always left."""
        sampling = seq.request.sampling
        if sampling.allowed_ids:
            (ids,) = upload([torch.tensor(sorted(sampling.allowed_ids))], logits.device)
            kept = logits[ids]
            logits.fill_(-torch.inf)[ids] = kept
        if sampling.grammar:
            self._follow_grammar(logits, seq)
        if sampling.bad_words:
            self._drop(logits, bad_ends(sampling.bad_words, seq.output))
        if sampling.stop_ids and len(seq.output) < sampling.min_tokens:
            self._drop(logits, sorted(sampling.stop_ids))

    def _drop(self, logits: torch.Tensor, ids: list[int]) -> None:
        """Unless nothing would be left."""
        if ids:  # decided where the logits are: a GPU is not waited for
            (index,) = upload([torch.tensor(ids)], logits.device)
            dropped = logits.index_fill(0, index, -torch.inf)
            is_empty = torch.isneginf(dropped).all()
            logits.copy_(torch.where(is_empty, logits, dropped))

    def _follow_grammar(self, logits: torch.Tensor, seq: Sequence) -> None:
        """A grammar that fails here, though the front door took it, ends the answer."""
        self.expect([seq])
        allowed = None
        if seq.id in self._matchers:
            try:
                matcher = self._matchers[seq.id].result(timeout=COMPILE_TIMEOUT_S)
                allowed = matcher.allowed(seq.output)
            except TimeoutError:
                log.error("the grammar of request %s is not compiled in time", seq.id)
        if allowed is None:
            mask = torch.zeros(len(logits), dtype=torch.bool)
            mask[sorted(seq.stop_ids)] = True
        else:
            mask = torch.from_numpy(allowed)
        if bool(mask.any()):
            (ruled_out,) = upload([~mask], logits.device)
            logits.masked_fill_(ruled_out, -torch.inf)


def is_constrained(sampling: Sampling) -> bool:
    return bool(sampling.allowed_ids or sampling.bad_words or sampling.grammar)


def bad_ends(bad_words: Iterable[Tokens[int]], output: list[int]) -> list[int]:
    """The tokens that would complete one of the words now."""
    ends = set()
    for *start, end in bad_words:
        if not start or output[-len(start) :] == start:
            ends.add(end)
    return sorted(ends)
