"""Scheduling policies: what one step may contain. The scheduler fills it.

A policy is a function from the limits and the state of the batch to the turns that the step may
take, best first; the first turn that yields work is the step.

    chunked        every decode, then prompt chunks up to the budget, in multiples of eight
                   (Sarathi-Serve, OSDI'24, algorithm 3: stall-free batching)
    splitfuse      the same, every step filled to the last token
                   (DeepSpeed-FastGen, arXiv 2401.08671, section 3: Dynamic SplitFuse)
    prefill-first  whole prompts as soon as they fit, decodes only when none does
                   (vLLM before chunked prefill, TGI)
    static         a batch runs until its last sequence ends, then the next one starts
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker is configured to do in one step."""

    max_tokens: int = 2048  # the step budget: decodes and prompt tokens
    max_seqs: int = 256
    policy: str = "chunked"
    online: bool = False  # max_tokens is a ceiling; below it, the promised gaps decide

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r} is not one of {', '.join(POLICIES)}")

    @property
    def by_deadline(self) -> bool:
        """Whether prompts take turns by urgency; the older policies take them as they come."""
        return self.policy in ("chunked", "splitfuse")

    @property
    def prefill_floor(self) -> int:
        """Tokens kept for prompts when decodes alone would fill the budget."""
        return max(1, self.max_tokens // 8)


@dataclass(frozen=True, slots=True)
class Batch:
    """The state that a policy may look at."""

    num_decodes: int
    num_prefills: int  # admitted, prompt not finished
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step may contain."""

    max_decodes: int = 0
    max_prefill_tokens: int = 0
    tile: int = 0  # a chunk that does not end its prompt is a multiple of this; 0: never cut
    admit: bool = True


UNBOUNDED = 1 << 60
TILE = 8


def _stall_free(limits: Limits, batch: Batch, tile: int) -> list[Turn]:
    prompts = bool(batch.num_prefills or batch.num_waiting)
    floor = limits.prefill_floor if prompts else 0
    max_decodes = max(1, limits.max_tokens - floor)
    left = limits.max_tokens - min(batch.num_decodes, max_decodes)
    return [Turn(max_decodes, left, tile)]


def chunked(limits: Limits, batch: Batch) -> list[Turn]:
    return _stall_free(limits, batch, TILE)


def splitfuse(limits: Limits, batch: Batch) -> list[Turn]:
    return _stall_free(limits, batch, 1)


def prefill_first(limits: Limits, batch: Batch) -> list[Turn]:
    decodes = Turn(max_decodes=UNBOUNDED, admit=False)
    return [Turn(max_prefill_tokens=limits.max_tokens), decodes]


def static(limits: Limits, batch: Batch) -> list[Turn]:
    idle = not (batch.num_decodes or batch.num_prefills)
    decodes = Turn(max_decodes=UNBOUNDED, admit=False)
    return [Turn(max_prefill_tokens=UNBOUNDED, admit=idle), decodes]


POLICIES: dict[str, Callable[[Limits, Batch], list[Turn]]] = {
    "chunked": chunked,
    "splitfuse": splitfuse,
    "prefill-first": prefill_first,
    "static": static,
}
