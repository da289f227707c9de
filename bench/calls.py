"""Calls straight to a gateway, in whatever time its clock tells."""

import itertools
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from serving.gateway import Gateway
from serving.generation import Generation, Trace, Usage
from workers.core.request import Sampling


@dataclass(slots=True)
class Answer:
    """What one call brings, as it comes."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    usage: Usage | None = None  # told once, at the end

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in itertools.pairwise(self.times)), default=0.0)


async def ask(
    gateway: Gateway,
    id: str,
    prompt: Sequence[int],
    num_tokens: int,
    mode: str = "disaggregated",
    pinned: tuple[str, ...] = (),
    answer: Answer | None = None,
) -> Answer:
    """Greedy. Fills ``answer`` as tokens come; raises what ``generate`` does."""
    answer = answer or Answer()
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0)
    call = Generation(id, id, (tuple(prompt),), sampling, gateway.clock(), mode=mode, pinned=pinned)
    async with aclosing(gateway.generate(call)) as deltas:
        async for delta in deltas:
            answer.tokens += delta.token_ids
            answer.times += [gateway.clock()] * len(delta.token_ids)
            if delta.final is not None:
                answer.trace, answer.usage = delta.final.trace, delta.final.usage
    return answer
