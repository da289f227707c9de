"""Which workers serve a request, and why. Mixed serving is the case prefill == decode.

Costs are in *tokens of wait*: how many prompt tokens' worth of computing somebody waits.

    wait    prompt tokens queued at the prefill worker, and the prompt itself
    harm    its running decodes, each slowed by every chunk of the prompt that rides with them
    move    handing the KV over, when the decode worker is another one
    crowd   the streams already on the decode worker, and the prompts that will ride with this one

A role is a preference: workers whose role does not fit serve only when no fitting one exists.
Disaggregated has to be clearly cheaper, because it keeps two workers busy. Predicted seconds
replace these costs once workers report a latency model.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import nsmallest

AUTO, MIXED, DISAGGREGATED = "auto", "mixed", "disaggregated"

HARM = 0.25  # of a prompt token, felt by each decode that it rides with
MOVE_TOKENS = 32.0  # a hand-off, whatever its size
MOVE = 0.1  # per prompt token handed off
CROWD_TOKENS = 8.0  # per stream on the decode worker
KEPT = 4  # workers weighed on each side; the rest cost more
MARGIN = 0.8  # disaggregated costs at most this part of mixed, or stays mixed

SERVE_MIXED = {"mixed": 0, "decode": 1, "prefill": 2}  # role -> rank, the least is preferred
SERVE_PREFILL = {"prefill": 0, "mixed": 1, "decode": 2}
SERVE_DECODE = {"decode": 0, "mixed": 1, "prefill": 2}


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A worker's load as last reported, plus what this gateway sent it since."""

    id: str
    role: str
    capacity: int  # tokens that fit its empty pool and its context
    queued_tokens: int = 0
    decode_seqs: int = 0
    waiting_seqs: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the request, with its price in tokens of wait."""

    prefill: str
    decode: str
    wait: float
    harm: float
    move: float
    crowd: float

    @property
    def cost(self) -> float:
        return self.wait + self.harm + self.move + self.crowd

    @property
    def is_split(self) -> bool:
        return self.prefill != self.decode


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Where to, why, and what else was weighed (the cheapest first)."""

    prefill: str
    decode: str
    reason: str
    candidates: tuple[Candidate, ...] = ()

    @property
    def is_split(self) -> bool:
        return self.prefill != self.decode

    @property
    def mode(self) -> str:
        return DISAGGREGATED if self.is_split else MIXED


class NoRoute(Exception):
    """No worker can serve it. ``too_long``: not even when all of them are idle."""

    def __init__(self, message: str, too_long: bool = False) -> None:
        super().__init__(message)
        self.too_long = too_long


def route(
    prompt_tokens: int,
    total_tokens: int,
    replicas: Sequence[ReplicaView],
    *,
    mode: str = AUTO,
    pinned: Sequence[str] = (),
    avoid: Collection[str] = (),
) -> RouteDecision:
    """The cheapest way to serve a request that may grow to ``total_tokens``.

    ``pinned`` names the worker, or the prefill and the decode worker. Workers in ``avoid`` (they
    just failed this request) are used only when nobody else is left, and a mode that they alone
    made possible is given up before the request is. Raises NoRoute.
    """
    if not replicas:
        raise NoRoute("no worker is attached")
    if pinned:
        return _pinned(prompt_tokens, total_tokens, replicas, mode, pinned)
    usable = [r for r in replicas if r.id not in avoid] or list(replicas)
    mixed = [] if mode == DISAGGREGATED else _mixed(prompt_tokens, total_tokens, usable)
    split: list[Candidate] = []
    if mode != MIXED:
        share = mode == DISAGGREGATED or not mixed  # else mixed workers share by routing alone
        split = _split(prompt_tokens, total_tokens, usable, share)
    if not mixed and not split and avoid and mode != AUTO:
        return route(prompt_tokens, total_tokens, replicas, avoid=avoid)
    if not mixed and not split:
        raise _no_route(prompt_tokens, total_tokens, usable, mode)
    return _decide(prompt_tokens, mixed, split, mode)


def rehome(
    total_tokens: int, replicas: Sequence[ReplicaView], avoid: Collection[str] = ()
) -> str | None:
    """Where a running stream goes on best that leaves its worker; None when nobody can take it."""
    fit = [r for r in replicas if r.id not in avoid and r.capacity >= total_tokens]
    best = min(fit, key=_as_home, default=None)
    return None if best is None else best.id


def _as_home(r: ReplicaView) -> tuple[int, float, str]:
    crowd = CROWD_TOKENS * (r.decode_seqs + r.waiting_seqs) + HARM * r.queued_tokens
    return SERVE_DECODE[r.role], crowd, r.id


def _decide(
    prompt_tokens: int, mixed: list[Candidate], split: list[Candidate], mode: str
) -> RouteDecision:
    best_mixed = min(mixed, key=_price, default=None)
    best_split = min(split, key=_price, default=None)
    ranked = tuple(sorted(mixed + split, key=_price))
    if best_split is None or (best_mixed and best_split.cost > MARGIN * best_mixed.cost):
        assert best_mixed is not None
        chosen, other = best_mixed, best_split
    else:
        chosen, other = best_split, best_mixed
    reason = _describe(prompt_tokens, chosen)
    if mode != AUTO:
        reason += "; the request asked for this mode"
    elif other is not None:
        reason += f"; {_name(other)} would cost {other.cost:.0f}"
    else:
        reason += "; no worker offers the other mode"
    return RouteDecision(chosen.prefill, chosen.decode, reason, ranked)


def _mixed(prompt: int, total: int, replicas: Sequence[ReplicaView]) -> list[Candidate]:
    fit = [r for r in replicas if r.capacity >= total]
    rank = min((SERVE_MIXED[r.role] for r in fit), default=None)
    fit = [r for r in fit if SERVE_MIXED[r.role] == rank]
    best = nsmallest(KEPT, fit, key=lambda r: (_wait(prompt, r) + _crowd(r), _crowd(r), r.id))
    return [_candidate(prompt, r, r) for r in best]


def _split(
    prompt: int, total: int, replicas: Sequence[ReplicaView], share: bool
) -> list[Candidate]:
    """Pairs of the best rank. A pair costs what its halves cost, so the cheapest pair is one of
    the cheapest halves; ``share`` lets two mixed workers be a pair."""
    prefills = _cheapest(
        [r for r in replicas if r.capacity >= prompt], lambda r: (_wait(prompt, r), r.id)
    )
    decodes = _cheapest(
        [r for r in replicas if r.capacity >= total], lambda r: (_crowd(r) + _ride(r), r.id)
    )
    pairs = [
        (SERVE_PREFILL[p.role] + SERVE_DECODE[d.role], p, d)
        for p in prefills
        for d in decodes
        if p.id != d.id and (share or (p.role, d.role) != ("mixed", "mixed"))
    ]
    best = min((rank for rank, _, _ in pairs), default=None)
    return [_candidate(prompt, p, d) for rank, p, d in pairs if rank == best]


def _cheapest(
    replicas: Sequence[ReplicaView], price: Callable[[ReplicaView], tuple[float, str]]
) -> list[ReplicaView]:
    """A few of each role."""
    roles = {r.role for r in replicas}
    by_role = ([r for r in replicas if r.role == role] for role in sorted(roles))
    return [r for group in by_role for r in nsmallest(KEPT, group, key=price)]


def _wait(prompt: int, p: ReplicaView) -> float:
    return p.queued_tokens + prompt + HARM * p.decode_seqs * prompt


def _crowd(d: ReplicaView) -> float:
    return CROWD_TOKENS * (d.decode_seqs + d.waiting_seqs)


def _ride(d: ReplicaView) -> float:
    return HARM * d.queued_tokens


def _candidate(prompt: int, p: ReplicaView, d: ReplicaView) -> Candidate:
    is_split = p.id != d.id
    return Candidate(
        prefill=p.id,
        decode=d.id,
        wait=float(p.queued_tokens + prompt),
        harm=HARM * p.decode_seqs * prompt,
        move=MOVE_TOKENS + MOVE * prompt if is_split else 0.0,
        crowd=_crowd(d) + (_ride(d) if is_split else 0.0),
    )


def _pinned(
    prompt: int, total: int, replicas: Sequence[ReplicaView], mode: str, pinned: Sequence[str]
) -> RouteDecision:
    by_id = {r.id: r for r in replicas}
    for name in pinned:
        if name not in by_id:
            raise NoRoute(f"no worker {name!r} is attached; there are {', '.join(sorted(by_id))}")
    p, d = by_id[pinned[0]], by_id[pinned[-1]]
    if mode != AUTO and (mode == DISAGGREGATED) != (p is not d):
        raise NoRoute(f"mode {mode} does not fit the pinned workers {', '.join(pinned)}")
    if p.capacity < prompt or d.capacity < total:
        raise _no_route(prompt, total, [p, d], mode)
    chosen = _candidate(prompt, p, d)
    return RouteDecision(p.id, d.id, f"{_describe(prompt, chosen)}; pinned", (chosen,))


def _no_route(prompt: int, total: int, usable: Sequence[ReplicaView], mode: str) -> NoRoute:
    names = ", ".join(f"{r.id} ({r.role}, {r.capacity} tokens)" for r in usable)
    if mode == DISAGGREGATED and len(usable) < 2:
        return NoRoute(f"mode disaggregated needs two workers; attached: {names}")
    return NoRoute(
        f"the prompt of {prompt} tokens may grow to {total}, which no worker for mode {mode} can "
        f"hold: {names}",
        too_long=True,
    )


def _price(candidate: Candidate) -> tuple[float, float, str, str]:
    return candidate.cost, candidate.crowd, candidate.prefill, candidate.decode


def _name(candidate: Candidate) -> str:
    if candidate.is_split:
        return f"disaggregated over {candidate.prefill} to {candidate.decode}"
    return f"mixed on {candidate.prefill}"


def _describe(prompt: int, c: Candidate) -> str:
    text = f"{_name(c)}: {prompt} prompt tokens behind {c.wait - prompt:.0f} queued"
    if c.harm:
        text += f", slowing {c.harm / (HARM * prompt):.0f} decodes"
    return f"{text} (cost {c.cost:.0f})"
