"""What a worker tells the world after each step."""

from dataclasses import dataclass

from kvtransfer.core.handle import KVHandle


@dataclass(frozen=True, slots=True)
class PromptToken:
    """What the model thought of one token of a prompt, of the second one on."""

    logprob: float
    rank: int  # 1: it was the most likely one
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), most likely first


@dataclass(slots=True)  # not frozen, but never changed: a frozen one takes twice as long to make
class Token:
    """One sampled token. ``top`` holds (id, logprob) pairs, most likely first, when asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: tuple[PromptToken, ...] = ()  # with a request's first token, when asked for


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a request spent in each part of its life on this worker."""

    queue_s: float = 0.0  # submitted -> first chunk planned (or fetch started)
    prefill_s: float = 0.0  # first chunk planned -> first token
    transfer_s: float = 0.0  # fetch started -> pages landed
    num_preemptions: int = 0
    cached_tokens: int = 0  # of the prompt: their pages were here already


@dataclass(slots=True)  # not frozen, but never changed: a frozen one takes twice as long to make
class Output:
    """What one step brought one request. The last one has a finish_reason or a handle."""

    request_id: str
    token: Token | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    handle: KVHandle | None = None  # handed off: the pages wait here under a lease
    promise: KVHandle | None = None  # to be handed off: pages may be fetched as they are computed
    error: str | None = None  # with finish_reason "error"
    fallback: str | None = None  # why KV had to be recomputed here instead of fetched
    timing: Timing | None = None  # with the first token made here, and with the last

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.handle is not None

    @property
    def is_plain(self) -> bool:
        """The id of a token, and nothing else to tell."""
        token = self.token
        return (
            (self.finish_reason or self.handle or self.promise) is None
            and (self.error or self.fallback or self.timing) is None
            and token is not None
            and token.logprob is None
            and not token.prompt
        )


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's load, as it reports it after each step and when it changes without one."""

    waiting_seqs: int = 0
    running_seqs: int = 0  # in the batch: prefills and decodes
    decode_seqs: int = 0
    queued_tokens: int = 0  # prompt tokens not yet computed, waiting and running
    context_tokens: int = 0  # sum of the running decodes' contexts
    free_pages: int = 0  # those kept for their contents included
    num_pages: int = 0
    leased_pages: int = 0  # handed off and not yet fetched
    step: int = 0  # counter of finished steps: the progress heartbeat
    step_s: float = 0.0  # duration of the last step
    num_preemptions: int = 0  # since start
    prompt_tokens: int = 0  # computed since start
    output_tokens: int = 0  # sampled since start
    cached_tokens: int = 0  # found in the prefix cache instead of computed, since start
    chunk_tokens: int = 0  # prompt tokens of the last step that had any
    predicted_ratio: float = 1.0  # step time predicted / observed, mean of recent steps
    prediction_error: float = 0.0  # |predicted / observed - 1|, mean of recent steps
    promised_itl_s: float = 0.0  # the tightest gap promised to a running decode; 0: none


@dataclass(frozen=True, slots=True)
class Report:
    """One message per engine step."""

    outputs: tuple[Output, ...]
    load: Load


@dataclass(frozen=True, slots=True)
class KVLedger:
    """Who holds each page of a worker, for /debug/kv and the leak tests."""

    num_pages: int
    free: int  # those kept for their contents included
    cached: int  # pages kept for their contents, held by nobody
    owned: dict[str, int]  # request id -> pages
    leased: dict[str, int]  # request id -> pages handed off, waiting for the receiver

    @property
    def is_clean(self) -> bool:
        return not self.owned and not self.leased and self.free == self.num_pages
