"""Why a request ran where it did, in words: what was expected of each way, and what happened.

It turns traces into plain values and lines of text. It refuses to know where traces come from.
"""

from collections.abc import Mapping
from typing import Any

from serving.core.router import Candidate, RouteDecision
from serving.generation import Trace

MOST_SHOWN = 6  # ways
ENDS = {"stop": "answered to its end", "length": "answered up to the most tokens that it asked for"}


def told(candidate: Candidate) -> dict[str, Any]:
    """A way and its predictions as plain values."""
    mode = "disaggregated" if candidate.is_split else "mixed"
    predicted = {"ttft_s": candidate.ttft_s, "loss": candidate.loss}
    return {"mode": mode, **candidate._asdict(), **predicted}


def note_decision(trace: Trace, decision: RouteDecision) -> None:
    trace.mode, trace.reason = decision.mode, decision.reason
    trace.prefill_worker, trace.decode_worker = decision.prefill, decision.decode
    trace.candidates = [told(candidate) for candidate in decision.candidates]
    trace.predicted = told(decision.chosen)
    other = decision.other
    trace.margin = other.price - decision.chosen.price if other is not None else 0.0


def note_first_token(trace: Trace, ttft_s: float) -> None:
    """The parts of its time: in the queue, computing, and the rest, which is the front door's."""
    trace.ttft_s = ttft_s
    trace.ttft_queue_s, trace.ttft_prefill_s = trace.queue_s, trace.prefill_s
    trace.front_s = max(0.0, ttft_s - trace.queue_s - trace.prefill_s)


def regret(trace: Trace, ttft_slo_s: float, itl_slo_s: float) -> float:
    """By how much the other mode was expected to do better than this one did, in promises: 0 when
    both promises were kept, or when nothing else could be had."""
    kept = trace.ttft_s <= ttft_slo_s and trace.late_gaps == 0
    others = [c["loss"] for c in trace.candidates if c["mode"] != trace.mode]
    return 0.0 if kept or not others else max(0.0, 1.0 - min(others))


def lines(explanation: Mapping[str, Any]) -> list[str]:
    """For people. Every number has its unit, every word is an everyday one."""
    e, usage = explanation, explanation["usage"]
    text = [
        f"Request {e['request_id']}: {ENDS.get(e['outcome'], e['outcome'])}, "
        f"{usage['prompt_tokens']} tokens in and {usage['completion_tokens']} out.",
        f"It ran in {e['mode']} mode: {_where(e)}.",
        f"Why: {e['reason']}.",
    ]
    if e.get("predicted"):
        text += ["", *_expected(e)]
    text += ["", *_ways(e)]
    if e.get("fallback"):
        text.append(f"Something was computed twice: {e['fallback']}.")
    return text


def _where(e: Mapping[str, Any]) -> str:
    if e["mode"] == "mixed":
        return f"{e['prefill_worker']} read the prompt and wrote the answer"
    return (
        f"{e['prefill_worker']} read the prompt, {e['decode_worker']} wrote the answer, and the "
        "prompt's memory (KV) moved between them"
    )


def _expected(e: Mapping[str, Any]) -> list[str]:
    p, late = e["predicted"], e["late_gaps"]
    verdicts = (
        "kept" if e["ttft_s"] <= e["ttft_slo_s"] else "broken",
        f"broken {late} times" if late else "kept every time",
    )
    rows = [
        ("first token after", p["ttft_s"], e["ttft_s"], e["ttft_slo_s"], verdicts[0]),
        ("then, on average, one every", p["itl_s"], e["itl_s"], e["itl_slo_s"], verdicts[1]),
    ]
    text = [f"{'':28}{'expected':>10}{'happened':>10}{'promised':>10}"]
    for name, *seconds, verdict in rows:
        text.append(f"{name:28}" + "".join(f"{_s(s):>10}" for s in seconds) + f"  {verdict}")
    text.append(
        f"The first token's time: {_s(e['ttft_queue_s'])} in the worker's queue, "
        f"{_s(e['ttft_prefill_s'])} reading the prompt beside others' answers, {_s(e['front_s'])} "
        "for the rest (gateway and network)."
    )
    if e["mode"] == "disaggregated":
        text.append(
            f"The second token came {_s(e['second_s'])} after the first, {_s(e['transfer_s'])} of "
            "that to move the KV."
        )
    text.append(
        f"The longest pause between two tokens was {_s(e['worst_itl_s'])}; the whole answer took "
        f"{_s(e['ttft_s'] + e['transfer_s'] + e['decode_s'])}."
    )
    return text


def _ways(e: Mapping[str, Any]) -> list[str]:
    ways = e["candidates"]
    wide = 2 + max([14, *(len(way[end]) for way in ways for end in ("prefill", "decode"))])
    text = [
        "The ways that were weighed, the cheapest first; > is the one that was taken. The price is",
        "own (how likely it breaks a promise to this request) + others (promises to others that it",
        "is expected to break) + cost (time, GPUs, workers used for what they are not there for).",
        "A way over two workers, which moves the KV, is taken when it is clearly cheaper.",
        f"{'':2}{'prompt on':{wide}}{'answer on':{wide}}{'1st token':>10}{'each next':>10}"
        f"{'KV moves':>9}{'own':>7}{'others':>8}{'cost':>7}{'price':>8}",
    ]
    for way in ways[:MOST_SHOWN]:
        is_it = way["prefill"] == e["prefill_worker"] and way == e.get("predicted")
        own, cost = way["loss"] - way["harm"], way["price"] - way["loss"]
        text.append(
            f"{'>' if is_it else ' ':2}{way['prefill']:{wide}}{way['decode']:{wide}}"
            f"{_s(way['ttft_s']):>10}{_s(way['itl_s']):>10}{_s(way['transfer_s']):>9}"
            f"{own:>7.3f}{way['harm']:>8.3f}{cost:>7.3f}{way['price']:>8.3f}"
        )
    if len(ways) > MOST_SHOWN:
        text.append(f"  and {len(ways) - MOST_SHOWN} more")
    return text


def _s(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
