"""Our values as protobuf messages and back, for the stream between a gateway and a worker.

It knows field names. It refuses to check meaning: the front door validates, the engine fails what
it cannot run.
"""

import dataclasses
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from kvtransfer.messages import handle_from_wire, handle_to_wire
from protos import evenflow_pb2 as pb
from serving.pools import Submission
from workers.core.latency import GUESS
from workers.core.output import KVLedger, Load, Output, PromptToken, Timing, Token
from workers.core.pace import Pace
from workers.core.request import SLO, Request, Sampling, Sequence

_LOAD_FIELDS = tuple(f.name for f in dataclasses.fields(Load))
_load_values = attrgetter(*_LOAD_FIELDS)
_PACE_FIELDS = tuple(f.name for f in dataclasses.fields(Pace))
_SCALARS = (  # of Sampling: same name and meaning on both sides
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def submission_to_wire(submission: Submission, now: float) -> pb.Submit:
    request = submission.request
    return pb.Submit(
        request_id=request.id,
        prompt=request.prompt,
        output=submission.output,
        sampling=_sampling_to_wire(request.sampling),
        ttft_slo_s=request.slo.ttft_s,
        itl_slo_s=request.slo.itl_s,
        age_s=max(0.0, now - request.arrived_at),
        priority=request.priority,
        cache_salt=request.cache_salt,
        hand_off=submission.hand_off,
        early=submission.early,
        handle=None if submission.handle is None else handle_to_wire(submission.handle),
    )


def sequence_from_wire(message: pb.Submit, now: float) -> Sequence:
    """What a worker makes of a submission; ``now`` is on the worker's clock."""
    request = Request(
        id=message.request_id,
        prompt=tuple(message.prompt),
        sampling=_sampling_from_wire(message.sampling),
        slo=SLO(message.ttft_slo_s, message.itl_slo_s),
        arrived_at=now - message.age_s,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )
    return Sequence(
        request,
        hand_off=message.hand_off,
        is_early=message.early,
        handle=handle_from_wire(message.handle) if message.HasField("handle") else None,
        output=list(message.output),
    )


def requests_of(message: pb.Command | pb.Event) -> list[str]:
    """The requests that one message of the stream is about."""
    if isinstance(message, pb.Event):
        return [output.request_id for output in message.report.outputs]
    names = (message.submit.request_id, message.abort, message.hand_off)
    return [name for name in names if name]


def _sampling_to_wire(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        **{name: getattr(sampling, name) for name in _SCALARS},
        logit_bias=dict(sampling.logit_bias),
        stop_ids=sorted(sampling.stop_ids),
        allowed_ids=sorted(sampling.allowed_ids),
        bad_words=[pb.TokenIds(ids=word) for word in sampling.bad_words],
        grammar=sampling.grammar,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def _sampling_from_wire(message: pb.Sampling) -> Sampling:
    return Sampling(
        **{name: getattr(message, name) for name in _SCALARS},
        logit_bias=tuple(sorted(message.logit_bias.items())),
        stop_ids=frozenset(message.stop_ids),
        allowed_ids=frozenset(message.allowed_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        grammar=message.grammar,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def report_to_wire(outputs: Iterable[Output], load: Load, **about: Any) -> pb.Report:
    """Most outputs are a token and nothing else: these are made where they will be."""
    report = pb.Report(load=load_to_wire(load), **about)
    add = report.outputs.add
    for output in outputs:
        token = output.token
        if token is not None and output.is_plain:
            add(request_id=output.request_id, token=token.id)
        else:
            report.outputs.append(output_to_wire(output))
    return report


def output_to_wire(output: Output) -> pb.Output:
    message = pb.Output(
        request_id=output.request_id,
        finish_reason=output.finish_reason or "",
        error=output.error or "",
        fallback=output.fallback or "",
    )
    if output.token is not None:
        message.token = output.token.id
        if output.token.logprob is not None:
            message.logprob = output.token.logprob
        for token_id, logprob in output.token.top:
            message.top_ids.append(token_id)
            message.top_logprobs.append(logprob)
        if output.token.prompt:
            message.prompt.extend(map(_prompt_to_wire, output.token.prompt))
    if output.handle is not None:
        message.handle.CopyFrom(handle_to_wire(output.handle))
    if output.promise is not None:
        message.promise.CopyFrom(handle_to_wire(output.promise))
    if output.timing is not None:
        timing = output.timing
        message.timing.queue_s = timing.queue_s
        message.timing.prefill_s = timing.prefill_s
        message.timing.transfer_s = timing.transfer_s
        message.timing.num_preemptions = timing.num_preemptions
        message.timing.cached_tokens = timing.cached_tokens
    return message


def output_from_wire(message: pb.Output) -> Output:
    token = None
    if message.HasField("token"):
        logprob = message.logprob if message.HasField("logprob") else None
        top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
        token = Token(message.token, logprob, top)
        if message.prompt:
            prompt = tuple(map(_prompt_from_wire, message.prompt))
            token = dataclasses.replace(token, prompt=prompt)
    return Output(
        request_id=message.request_id,
        token=token,
        finish_reason=message.finish_reason or None,
        handle=handle_from_wire(message.handle) if message.HasField("handle") else None,
        promise=handle_from_wire(message.promise) if message.HasField("promise") else None,
        error=message.error or None,
        fallback=message.fallback or None,
        timing=_timing_from_wire(message.timing) if message.HasField("timing") else None,
    )


def _prompt_to_wire(token: PromptToken) -> pb.PromptToken:
    return pb.PromptToken(
        logprob=token.logprob,
        rank=token.rank,
        top_ids=[token_id for token_id, _ in token.top],
        top_logprobs=[logprob for _, logprob in token.top],
    )


def _prompt_from_wire(message: pb.PromptToken) -> PromptToken:
    top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
    return PromptToken(message.logprob, message.rank, top)


def _timing_from_wire(message: pb.Timing) -> Timing:
    return Timing(
        message.queue_s,
        message.prefill_s,
        message.transfer_s,
        message.num_preemptions,
        message.cached_tokens,
    )


def load_to_wire(load: Load) -> pb.Load:
    return pb.Load(**dict(zip(_LOAD_FIELDS, _load_values(load), strict=True)))


def load_from_wire(message: pb.Load) -> Load:
    return Load(*_load_values(message))


def pace_to_wire(pace: Pace) -> pb.Pace:
    return pb.Pace(**{name: getattr(pace, name) for name in _PACE_FIELDS})


def pace_from_wire(message: pb.Pace) -> Pace | None:
    """None when it is of another release, whose model has another form."""
    if len(message.coefficients) != len(GUESS):
        return None
    values = {name: getattr(message, name) for name in _PACE_FIELDS}
    values["coefficients"] = tuple(message.coefficients)
    return Pace(**values)


def ledger_to_wire(ledger: KVLedger) -> pb.KVLedger:
    return pb.KVLedger(
        num_pages=ledger.num_pages,
        free=ledger.free,
        cached=ledger.cached,
        owned=ledger.owned,
        leased=ledger.leased,
    )


def ledger_from_wire(message: pb.KVLedger) -> KVLedger:
    return KVLedger(
        message.num_pages,
        message.free,
        message.cached,
        dict(message.owned),
        dict(message.leased),
    )
