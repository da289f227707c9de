"""A call while it runs: its sequences, where each has been, and what is told of it.

It holds facts. ``serving.gateway`` makes them.
"""

import asyncio
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvtransfer.core.handle import KVHandle
from serving.errors import RequestFailed
from serving.generation import Delta, Generation, Trace, Usage
from serving.mailbox import Mailbox
from serving.pools import Submission
from workers.core.output import Timing
from workers.core.request import Request


@dataclass(slots=True, eq=False)
class Seq:
    """One answer on its way, and the workers that may hold something of it."""

    request: Request
    generation: Generation
    trace: Trace = field(default_factory=Trace)
    output: list[int] = field(default_factory=list)
    handle: KVHandle | None = None
    touched: list[tuple[str, str]] = field(default_factory=list)  # (worker, id there) to abort
    lost: list[str] = field(default_factory=list)
    at: str = ""  # the worker that it runs on now
    target: str = ""  # the worker that it has been told to move to
    first_at: float = 0.0
    last_at: float = 0.0
    is_answered: bool = False  # has a token, or is over: no longer waiting
    num_hops: int = 0
    key: str = ""  # its name on the first worker

    def __post_init__(self) -> None:
        self.key = self.request.id

    def rename(self) -> None:
        """For the next worker. What is late from or for an earlier one then finds no other."""
        self.num_hops += 1
        self.request = replace(self.request, id=f"{self.key}~{self.num_hops}")

    def submission(self, hand_off: bool) -> Submission:
        handle, self.handle = self.handle, None
        return Submission(self.request, tuple(self.output), hand_off, handle)


@dataclass(slots=True, eq=False)
class Call:
    """One running generation; its choices' tasks fill ``deltas``."""

    generation: Generation
    seqs: list[Seq]
    deltas: Mailbox[Delta | RequestFailed] = field(default_factory=Mailbox)
    tasks: "list[asyncio.Task[None]]" = field(default_factory=list)
    outcome: str = "running"
    error: str = ""  # the kind of it, when it did not end as it should


def seq_of(generation: Generation, index: int) -> Seq:
    seed = (generation.sampling.seed + index % generation.n) % 2**64
    request = Request(
        id=generation.key if generation.num_choices == 1 else f"{generation.key}-{index}",
        prompt=generation.prompts[index // generation.n],
        sampling=replace(generation.sampling, seed=seed),
        slo=generation.slo,
        arrived_at=generation.arrived_at,
        priority=generation.priority,
        cache_salt=generation.cache_salt,
    )
    trace = Trace(ttft_slo_s=generation.slo.ttft_s, itl_slo_s=generation.slo.itl_s)
    return Seq(request, generation, trace)


def note_timing(trace: Trace, before: Timing, now: Timing) -> None:
    """Workers tell totals, with their first and their last token."""
    trace.queue_s += now.queue_s - before.queue_s
    trace.prefill_s += now.prefill_s - before.prefill_s
    trace.transfer_s += now.transfer_s - before.transfer_s
    trace.num_preemptions += now.num_preemptions - before.num_preemptions
    if now.prefill_s:  # not where the KV was fetched
        trace.cached_tokens = now.cached_tokens


def usage_of(call: Call) -> Usage:
    return Usage(
        prompt_tokens=sum(len(prompt) for prompt in call.generation.prompts),
        completion_tokens=sum(len(seq.output) for seq in call.seqs),
        cached_tokens=sum(seq.trace.cached_tokens for seq in call.seqs[:: call.generation.n]),
    )


def explanation_of(call: Call) -> dict[str, Any]:
    return {
        "request_id": call.generation.id,
        **asdict(call.seqs[0].trace),
        "outcome": call.outcome,
        "usage": asdict(usage_of(call)),
    }
