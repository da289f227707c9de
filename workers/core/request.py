"""A request as the client sent it, and the sequence a worker makes of it."""

from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.core.handle import KVHandle


@dataclass(frozen=True, slots=True)
class SLO:
    """What the client was promised: time to first token, and every gap between tokens after it."""

    ttft_s: float = 2.0
    itl_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when a sequence ends, in token ids only."""

    max_tokens: int = 16
    min_tokens: int = 0  # stop_ids cannot be sampled before this many
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0  # the front door draws one when the client gives none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: frozenset[int] = frozenset()  # with the model's end tokens unless ignored
    allowed_ids: frozenset[int] = frozenset()  # nothing else can be sampled; empty: everything can
    bad_words: tuple[tuple[int, ...], ...] = ()  # whose last token is not sampled after the others
    grammar: str = ""  # as ``workers.grammar`` makes it: the answer has this form
    logprobs: int | None = None  # alternatives reported with each token; 0: the chosen one only
    prompt_logprobs: int | None = None  # the same for each token of the prompt


@dataclass(frozen=True, slots=True)
class Request:
    """Never changes after admission."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    slo: SLO = SLO()
    arrived_at: float = 0.0  # on this process's clock
    priority: int = 0  # lower is served first, as in vLLM
    cache_salt: str = ""  # only requests with the same salt share cached prefixes

    @property
    def max_tokens_total(self) -> int:
        """Tokens whose KV the sequence can ever need: the last one sampled is never computed."""
        return len(self.prompt) + self.sampling.max_tokens - 1


class Phase(Enum):
    """Where a sequence is in its life; NEXT below is the whole life."""

    WAITING = "waiting"  # no pages
    FETCHING = "fetching"  # pages reserved, KV on its way from another worker
    LANDED = "landed"  # the KV is here before the token that follows it
    PREFILL = "prefill"  # part of prompt (+ output, after a preemption) computed
    DECODE = "decode"  # all but the last token computed
    HANDED_OFF = "handed off"  # pages now belong to a lease
    DONE = "done"


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.FETCHING, Phase.DONE}),
    Phase.FETCHING: frozenset(
        {Phase.LANDED, Phase.PREFILL, Phase.DECODE, Phase.WAITING, Phase.DONE}
    ),
    Phase.LANDED: frozenset({Phase.DECODE, Phase.DONE}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.HANDED_OFF, Phase.WAITING, Phase.DONE}),
    Phase.DECODE: frozenset({Phase.HANDED_OFF, Phase.WAITING, Phase.DONE}),
    Phase.HANDED_OFF: frozenset(),
    Phase.DONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on one worker. The scheduler alone changes it."""

    request: Request
    hand_off: bool = False  # stop after the next token and lease the pages
    handle: KVHandle | None = None  # where the KV of the tokens so far already is
    output: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    num_cached: int = 0  # of these, tokens whose pages were found here when it was admitted
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the full pages named so far
    num_published: int = 0  # pages that others can find by their keys
    num_preemptions: int = 0
    is_early: bool = False  # its KV and its next token are still computed at the handle's source
    id: str = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    max_output: int = field(init=False)  # tokens after which it ends: asked for, or all that fit
    quiet: int = 0  # decode steps in which nothing but one more token can happen
    rank: tuple[int, float, int] = (0, 0.0, 0)  # importance; given when it is submitted
    deadline: float = 0.0  # when its next token is due; given when it is queued

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.stop_ids = self.request.sampling.stop_ids
        self.max_output = self.request.sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def num_pending(self) -> int:
        """Tokens known but not computed: 1 for a running decode."""
        return self.num_tokens - self.num_computed

    @property
    def wants_prompt(self) -> bool:
        """Whether its first token has to bring what the model thought of each token before."""
        return self.request.sampling.prompt_logprobs is not None and not self.output

    @property
    def finish_reason(self) -> str | None:
        """Why the last token ends the sequence; None when it does not."""
        if not self.output:
            return None
        if self.output[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.output) >= self.max_output else None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of positions [start, stop) of prompt + output."""
        prompt, output = self.request.prompt, self.output
        known = len(prompt)
        if start >= known:
            return output[start - known : stop - known]
        return [*prompt[start:stop], *output[: max(0, stop - known)]]

    def move_to(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"{self.id}: {self.phase.name} -> {phase.name}"
        self.phase = phase
