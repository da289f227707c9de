"""What becomes of a request on a worker, and of those that are there already.

A worker is described by its load and its pace (``workers.core.pace``). The prompt is one half of a
request, its stream the other; they may go to two workers, so each half is predicted by itself.

    prompt   when is its first token, how likely is that too late, whom does it delay
    stream   how long are its gaps, how likely are they too long, whom does it slow

It knows the step budget's rules (``workers/core/budget.py``) and no clocks, pools or names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import erfc, log, sqrt
from typing import NamedTuple

from workers.core.budget import CEILING_S, FLOOR_TOKENS, PATIENCE, bounds_of
from workers.core.latency import KNEE
from workers.core.pace import Pace
from workers.core.request import SLO

GUESSED = Pace()
UNKNOWN_ROOM = 1 << 40
TTFT_SPREAD = 0.25  # of the log of a first token's time: who else comes is not known
MIN_ITL_SPREAD = 0.03
GAP_SPREAD = 0.15  # of the gap at a hand-off: when the step there ends is not known
FORGIVEN = 100  # a stream of more tokens may have one late gap and still is even
PLENTY = 0.4  # of the room for prompts is used: then there is plenty
GROWTH = 0.1  # of the log of a step's time, in a second: streams that nobody knows of yet
MEETS = 0.5  # chance that a stream that may arrive while a prompt is computed does
TIGHT = 0.5  # of what a promised gap leaves to streams is used: then prompts had better stay away
LONG_QUEUE = 64  # prompts of it that are looked at one by one
MIN_S = 1e-6
DEFAULT_SLO = SLO()


class Queued(NamedTuple):
    """A prompt that waits for its first token; they are served about in this order."""

    priority: int
    deadline: float
    work_s: float
    tokens: int
    key: str


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A worker's load as last reported, plus what this gateway sent it since."""

    id: str
    role: str
    capacity: int  # tokens that fit its empty pool and its context
    queued_tokens: int = 0
    decode_seqs: int = 0
    waiting_seqs: int = 0
    context_tokens: int = 0  # of the running decodes
    coming_seqs: int = 0  # will decode there and do not yet
    coming_tokens: int = 0
    arriving_at: tuple[float, ...] = ()  # of these, the ones that are prefilled elsewhere: when
    free_tokens: int = UNKNOWN_ROOM  # that its pool has room for, now
    promised_itl_s: float = 0.0  # the tightest gap promised to one that decodes or will; 0: none
    queue: tuple[Queued, ...] = ()  # what this gateway has there
    pace: Pace = GUESSED


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as routing sees it."""

    tokens: int  # to be computed: the prompt, and what was delivered before a replay
    total_tokens: int  # that it may grow to
    output_tokens: float = 128.0  # that are expected
    brief: float = 0.5  # chance that they are so few that no late gap is forgiven
    others_brief: float = 0.5  # the same of requests that run beside it
    slo: SLO = DEFAULT_SLO
    priority: int = 0
    waited_s: float = 0.0  # since it arrived
    is_early: bool = False  # pages move while the prompt is computed
    cached: Mapping[str, int] = field(default_factory=dict)  # worker -> tokens found there


@dataclass(frozen=True, slots=True)
class Demand:
    """The prompts that come, to all workers together."""

    num_workers: int = 1
    work: float = 0.0  # seconds of computing a second
    prompt_s: float = 1.0  # of one prompt

    def unserved(self, shares: Sequence[float], taken_s: float) -> float:
        """How many prompts to come will find no room when so much work cannot be done, given what
        some of the workers give to prompts: none while there is plenty, all of it when there is
        not enough."""
        room = sum(shares) * self.num_workers / max(1, len(shares))
        scarce = (self.work / max(room, MIN_S) - PLENTY) / (1.0 - PLENTY)
        return min(1.0, max(0.0, scarce)) * taken_s / max(self.prompt_s, MIN_S)


class Prompt(NamedTuple):
    """The first half of a request on one worker."""

    worker: ReplicaView
    queue_s: float  # until its first chunk
    prefill_s: float  # from there to the first token
    late: float  # chance that the first token comes too late
    harm: float  # promises to prompts behind it that are broken for it
    gpu_s: float
    share: float  # of its time that this worker gives to prompts
    last_tokens: int  # in the last chunk: their pages cannot move before
    tightness: float  # of the steps of streams there, against what they are promised: 0 to 1


class Stream(NamedTuple):
    """The second half of a request on one worker."""

    worker: ReplicaView
    itl_s: float
    room_s: float  # until there is room for it
    late: float  # chance that its gaps are too long
    harm: float  # promises to running streams that are broken for it
    gpu_s: float
    step_s: float  # of the step that runs when it comes, if no prompts are in it
    full_step_s: float  # and if there are some
    prompts_s: float  # how long there are
    taken_s: float  # work on prompts that a prefill worker cannot do because of it
    taken: float  # part of its time that cannot go to prompts as long as it runs


class Share(NamedTuple):
    """How a worker divides its time between decodes and prompts."""

    decode_s: float  # of a step, whatever else is in it
    chunk_s: float  # of a step, for prompts when there are some

    @property
    def of_prompts(self) -> float:
        return self.chunk_s / (self.decode_s + self.chunk_s)

    def lasts(self, work_s: float) -> float:
        """How long so much work on prompts takes."""
        return work_s + self.decode_s * work_s / self.chunk_s


def decode_step_s(pace: Pace, decodes: float, context: float) -> float:
    """A step without prompts."""
    c = pace.coefficients
    return c[0] + c[3] * decodes + c[4] * context + c[5] * max(0.0, decodes - KNEE) + MIN_S


def share_of(pace: Pace, decodes: int, context: float, itl_s: float) -> Share:
    """What ``workers.core.budget`` gives prompts, over a long row of equal steps."""
    c = pace.coefficients
    token_s = c[1] + c[5] + MIN_S
    alone = decode_step_s(pace, decodes, context)
    chunk = token_s * max(1, pace.max_tokens - decodes)
    if pace.is_online:
        most = bounds_of(alone, itl_s, pace.prompt_margin).most_s if decodes else CEILING_S
        chunk = min(chunk, max(most - alone, token_s * FLOOR_TOKENS))
    return Share(alone, chunk)


def on_time(seconds: float, limit_s: float, spread: float) -> float:
    """The chance to keep a limit, when what is predicted is off by about ``spread``."""
    if limit_s <= 0:
        return 0.0
    return 0.5 * erfc(log(max(seconds, MIN_S) / limit_s) / (spread * sqrt(2.0)))


def prompt_on(ask: Ask, w: ReplicaView, now: float, yard: Pace) -> Prompt:
    """The request's prompt on that worker, from now. Its cost is told in seconds of a worker of
    pace ``yard``: the same for all, or small errors of each model would look like costs."""
    pace = w.pace
    decodes = w.decode_seqs + w.coming_seqs // 2  # while it is computed
    context = w.context_tokens + w.coming_tokens // 2
    share = share_of(pace, decodes, context, w.promised_itl_s or 1e9)
    work_s = _work_s(ask, w, w.pace)
    due = now - ask.waited_s + _patience_s(ask, work_s, share)
    line = _line_up(w, (ask.priority, due), work_s, share, now)
    riding_s = min(share.chunk_s, queued_work_s(w))  # in the step that runs
    residual_s = 0.5 * (share.decode_s + riding_s) if decodes or w.queued_tokens else 0.0
    queue_s = residual_s + share.lasts(line.ahead_s)
    prefill_s = work_s + share.decode_s * max(1.0, work_s / share.chunk_s)
    late = _late_ttft(ask, pace, queue_s + prefill_s)
    begins, ends = now + queue_s, now + queue_s + prefill_s
    num_met = sum([at < now or begins <= at <= ends for at in w.arriving_at])
    harm = line.num_delayed + _harm_to_streams(ask, w, share, work_s, MEETS * num_met)
    own_s = _work_s(ask, w, yard)
    part = min(1.0, share.chunk_s / work_s)
    last = int(part * ask.tokens) if ask.is_early else ask.tokens
    tightness = _tightness(ask, w, share, work_s)
    return Prompt(w, queue_s, prefill_s, late, harm, own_s, share.of_prompts, last, tightness)


def _tightness(ask: Ask, w: ReplicaView, share: Share, work_s: float) -> float:
    promised = min(w.promised_itl_s or ask.slo.itl_s, ask.slo.itl_s)
    full_s = w.pace.max_tokens * work_s / ask.tokens  # of a fixed budget, with prompts like this
    if not w.pace.is_online and share.decode_s + full_s > promised:
        return 1.0  # whoever streams there shall meet no prompts
    fixed_s = w.pace.coefficients[0]
    return min(1.0, (share.decode_s - fixed_s) / max(MIN_S, promised - fixed_s) / TIGHT)


def _harm_to_streams(
    ask: Ask, w: ReplicaView, share: Share, work_s: float, num_met: float
) -> float:
    """Promises to streams there, and to those that arrive meanwhile (``num_met``), that steps with
    this prompt in them break, and steps without it would not."""
    pace, promised, harm = w.pace, w.promised_itl_s, 0.0
    num_streams = w.decode_seqs + w.coming_seqs
    if num_met:
        spread = GAP_SPREAD + pace.spread
        full_s = share.decode_s + min(share.chunk_s, work_s)
        kept = [on_time(1.5 * s, ask.slo.itl_s, spread) for s in (share.decode_s, full_s)]
        harm = num_met * ask.others_brief * (kept[0] - kept[1])
    if num_streams and promised:
        before_s, least_s = _shortest_steps(ask, w, share, work_s)
        num_steps = max(1.0, work_s / share.chunk_s)
        spread = max(MIN_ITL_SPREAD, pace.spread) + GROWTH * min(1.0, num_steps * share.decode_s)
        late = on_time(before_s, promised, spread) - on_time(least_s, promised, spread)
        harm += num_streams * late * (1.0 - (1.0 - ask.others_brief) ** num_steps)
    return harm


def _shortest_steps(ask: Ask, w: ReplicaView, share: Share, work_s: float) -> tuple[float, float]:
    """Without this prompt and with it, however tight it gets: a fixed budget knows no promises."""
    if w.pace.is_online:
        c = w.pace.coefficients
        return share.decode_s, share.decode_s + FLOOR_TOKENS * (c[1] + c[5])
    queued_s, budget = queued_work_s(w), w.pace.max_tokens
    before_s = queued_s * min(1.0, budget / max(1, w.queued_tokens))
    after_s = (queued_s + work_s) * min(1.0, budget / (w.queued_tokens + ask.tokens))
    return share.decode_s + before_s, share.decode_s + max(before_s, after_s)


def queued_work_s(w: ReplicaView) -> float:
    """Of all prompts there: as many as wait and one more, equally long."""
    num = w.waiting_seqs + 1
    return num * w.pace.prompt_s(0, -(-w.queued_tokens // num)) if w.queued_tokens else 0.0


def queued(ask: Ask, w: ReplicaView, now: float, key: str) -> Queued:
    """The prompt as one of those that wait there, as the worker will order them."""
    work_s = _work_s(ask, w, w.pace)
    share = share_of(w.pace, w.decode_seqs, w.context_tokens, w.promised_itl_s or 1e9)
    due = now - ask.waited_s + _patience_s(ask, work_s, share)
    return Queued(ask.priority, due, work_s, ask.tokens, key)


def _patience_s(ask: Ask, work_s: float, share: Share) -> float:
    return max(ask.slo.ttft_s, PATIENCE * work_s / share.of_prompts)


def late_again(ask: Ask, p: Prompt, wait_s: float) -> float:
    """The chance that the first token comes too late when the prompt has to wait longer."""
    return _late_ttft(ask, p.worker.pace, p.queue_s + p.prefill_s + wait_s)


def _late_ttft(ask: Ask, pace: Pace, ttft_s: float) -> float:
    spread = sqrt(pace.spread * pace.spread + TTFT_SPREAD * TTFT_SPREAD)
    return 1.0 - on_time(ttft_s, ask.slo.ttft_s - ask.waited_s, spread)


def _work_s(ask: Ask, w: ReplicaView, pace: Pace) -> float:
    """Seconds that the prompt adds to the steps it rides in; what is cached there is no work."""
    found = min(ask.cached.get(w.id, 0), ask.tokens - 1) if ask.cached else 0
    return pace.prompt_s(found, ask.tokens) + MIN_S


class _Line(NamedTuple):
    ahead_s: float  # work that goes first
    num_delayed: float  # prompts behind that miss their date only because of this one


def _line_up(
    w: ReplicaView, mine: tuple[int, float], work_s: float, share: Share, now: float
) -> _Line:
    """Where a prompt stands among those that this gateway has there. What others have there shows
    in the reported tokens, and goes first; so does what is done, and is taken off the front."""
    queue = w.queue
    if not queue:
        return _Line(queued_work_s(w), 0.0)
    known_s = known_tokens = 0.0
    for entry in queue:
        known_s += entry.work_s
        known_tokens += entry.tokens
    other_s = (w.queued_tokens - known_tokens) * known_s / max(1.0, known_tokens)
    ahead = shorter = other_s
    end, num_delayed, all_in_time = now + share.lasts(max(0.0, other_s)), 0.0, True
    for entry in queue[:LONG_QUEUE]:
        if entry.work_s <= work_s:
            shorter += entry.work_s
        is_behind = (entry.priority, entry.deadline) > mine
        if not is_behind:
            ahead += entry.work_s
        end += share.lasts(entry.work_s)
        if is_behind and end <= entry.deadline < end + share.lasts(work_s):
            num_delayed += 1.0
        all_in_time = all_in_time and end <= entry.deadline
    if len(queue) > LONG_QUEUE:
        ahead += sum(entry.work_s for entry in queue[LONG_QUEUE:])
    if all_in_time and not num_delayed:  # then the shortest goes first, and this one with them
        ahead = min(ahead, shorter)
    return _Line(max(0.0, ahead), num_delayed)


def stream_on(ask: Ask, w: ReplicaView, now: float, yard: Pace) -> Stream:
    """The request's stream on that worker, once it has its first token; ``yard`` as above."""
    pace, c = w.pace, yard.coefficients
    output = ask.output_tokens
    stays = _part_that_stays(ask, w, now)
    others = round(stays * w.decode_seqs) + w.coming_seqs
    context = stays * w.context_tokens + w.coming_tokens + others * 0.25 * output
    grown = context + ask.tokens + 0.5 * output
    before = decode_step_s(pace, others, context)
    after = decode_step_s(pace, others + 1, grown)
    spread = max(MIN_ITL_SPREAD, pace.spread)
    late = 1.0 - on_time(after, ask.slo.itl_s, spread)
    harm, promised = 0.0, w.promised_itl_s
    if others and promised:
        limit = promised
        harm = others * (on_time(before, limit, spread) - on_time(after, limit, spread))
    own_s = output * (c[3] + c[4] * (ask.tokens + 0.5 * output))
    tightest = min(promised, ask.slo.itl_s) if promised else ask.slo.itl_s
    share = share_of(pace, others, context, promised or 1e9)
    taken = 0.0
    if w.role == "prefill":  # with streams there already, it takes longer until there are none
        free = share_of(pace, 0, 0.0, 1e9)
        taken = free.of_prompts - share_of(pace, others + 1, grown, tightest).of_prompts
    queued_s = queued_work_s(w)
    full_s = share.decode_s + min(share.chunk_s, queued_s)
    room_s = _room_s(ask, w, after)
    late, harm = max(0.0, late), max(0.0, harm)
    taken = max(0.0, taken)
    lasts_s, taken_s = share.lasts(queued_s), output * after * taken
    return Stream(w, after, room_s, late, harm, own_s, before, full_s, lasts_s, taken_s, taken)


def _part_that_stays(ask: Ask, w: ReplicaView, now: float) -> float:
    """Of the streams that run there, until the last of those that arrive has arrived."""
    if not w.arriving_at:
        return 1.0
    life_s = ask.output_tokens * decode_step_s(w.pace, w.decode_seqs, w.context_tokens)
    return max(0.0, 1.0 - max(0.0, max(w.arriving_at) - now) / life_s)


def _room_s(ask: Ask, w: ReplicaView, step_s: float) -> float:
    """Until the pool has room for the prompt: as fast as streams there end."""
    missing = ask.tokens + w.coming_tokens - w.free_tokens
    held = w.context_tokens + w.coming_tokens
    if missing <= 0 or not held:
        return 0.0
    return min(1.0, missing / held) * ask.output_tokens * step_s


def gap_after(ttft_s: float, moved_s: float, s: Stream) -> float:
    """Between the first token of a stream that is handed off and the second: the KV moves, the step
    that runs there ends, and the next one has it."""
    step_s = s.full_step_s if s.prompts_s > ttft_s else s.step_s
    return moved_s + 1.5 * step_s


def late_gap(gap_s: float, ask: Ask, spread: float) -> float:
    """The chance that one gap of this length breaks the promise: a long stream is forgiven one."""
    late = 1.0 - on_time(gap_s, ask.slo.itl_s, GAP_SPREAD + spread)
    return late * ask.brief
