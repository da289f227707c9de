"""What a client asked for, checked, and what it gets back. Plain values; no text is made here."""

from dataclasses import dataclass, field
from typing import Any

from serving.calls import CallDelta
from workers.core.request import SLO, Sampling

AUTO, MIXED, DISAGGREGATED = "auto", "mixed", "disaggregated"
MODES = (AUTO, MIXED, DISAGGREGATED)


@dataclass(frozen=True, slots=True)
class Generation:
    """One call: one or more prompts, n answers to each. ``serving.api.intake`` makes it."""

    id: str  # the client's name for it
    key: str  # names its sequences on workers: unique whatever the client chose
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling  # the first answer's; answer j of a prompt uses seed + j
    arrived_at: float  # on the gateway's clock
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # leave the matched stop string in the text
    stop_token_ids: frozenset[int] = frozenset()  # the client's own, part of sampling.stop_ids
    mode: str = AUTO
    pinned: tuple[str, ...] = ()  # worker ids, prefill first: for tests
    slo: SLO = field(default_factory=SLO)
    priority: int = 0
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    tenant: str = ""  # whose it is, where keys are asked for
    traceparent: str = ""  # W3C trace context of the client

    @property
    def call_id(self) -> str:
        """What the gateway knows it by: clients of one tenant cannot name another's requests."""
        return call_id(self.tenant, self.id)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


def call_id(tenant: str, request_id: str) -> str:
    return f"{tenant}/{request_id}" if tenant else request_id


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as clients read it."""

    id: int
    text: str  # "bytes:\\xf0\\x9f" when the bytes alone are no text
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and its alternatives, most likely first."""

    chosen: TokenText
    top: tuple[TokenText, ...] = ()
    offset: int = 0  # characters of this choice's text before it


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """One token of a prompt as the model saw it coming. The first one has rank 0: nothing stands
    before it."""

    token: TokenText
    rank: int
    top: tuple[TokenText, ...]  # most likely first
    offset: int  # characters of the prompt's text before it


@dataclass(frozen=True, slots=True)
class Usage:
    """Each prompt counted once, the completions summed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Trace:
    """Where a request ran, why, and how long each part took. Filled in as it happens."""

    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    reason: str = ""
    workers: list[str] = field(default_factory=list)  # every one that was asked, in order
    candidates: list[dict[str, Any]] = field(default_factory=list)  # the cheapest first
    predicted: dict[str, Any] = field(default_factory=dict)  # of the one that was chosen
    margin: float = 0.0  # price of the other mode, less that of this one
    ttft_s: float = 0.0  # since it arrived here; what follows are its parts
    ttft_queue_s: float = 0.0
    ttft_prefill_s: float = 0.0
    front_s: float = 0.0  # the rest: the front door, and the way to the worker and back
    second_s: float = 0.0  # first token to second: a hand-off lies between them
    itl_s: float = 0.0  # mean gap between tokens
    worst_itl_s: float = 0.0
    late_gaps: int = 0  # longer than promised
    ttft_slo_s: float = 0.0
    itl_slo_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0  # first token to last, without the transfer
    cached_tokens: int = 0  # of the prompt, found instead of computed
    num_preemptions: int = 0
    num_moves: int = 0  # between workers, while it was running
    fallback: str = ""  # why KV was computed twice; "" when it was not
    outcome: str = "running"


@dataclass(frozen=True, slots=True)
class Final:
    """With the last delta of a call. The trace is that of the first choice."""

    usage: Usage
    trace: Trace


@dataclass(slots=True)  # not frozen, but never changed: a frozen one takes twice as long to make
class Delta:
    """What came next for one choice. Has text, calls or a finish_reason."""

    index: int
    text: str
    token_ids: tuple[int, ...]  # the tokens since the last delta, those that made no text included
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # "stop", "length" or "tool_calls"
    stop_reason: str | int | None = None  # the stop string or stop token id that matched
    final: Final | None = None
    prompt: tuple[PromptLogprob, ...] = ()  # with a choice's first delta, when asked for
    calls: tuple[CallDelta, ...] = ()  # of functions; the front door finds them in the text

    @property
    def is_plain(self) -> bool:
        """Text, and nothing else to tell."""
        return bool(self.text) and not (
            self.finish_reason is not None or self.logprobs or self.prompt or self.calls
        )
