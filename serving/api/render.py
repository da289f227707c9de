"""Deltas as OpenAI's JSON, for streams and whole answers. It knows no socket and no framework."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from json.encoder import encode_basestring as quoted
from typing import Any

from serving.api.intake import Ask, Streaming
from serving.calls import CallDelta
from serving.errors import RequestFailed
from serving.generation import (
    Delta,
    Final,
    PromptLogprob,
    TokenLogprobs,
    TokenText,
    Trace,
    Usage,
)

DONE = b"data: [DONE]\n\n"
MARK = "\x00"  # stands for the text in the form of an event
Json = dict[str, Any]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event(value: Any) -> bytes:
    """One server-sent event."""
    return f"data: {dumps(value)}\n\n".encode()


def error_body(error: RequestFailed) -> Json:
    """The only shape that errors have, on HTTP and inside streams."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def usage_object(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def evenflow_object(final: Final) -> Json:
    """Where the answer came from and how long each part took: what is the front door's and the
    wire's, waiting and computing come before the first token, moving and decoding after it."""
    trace: Trace = final.trace
    return {
        "mode": trace.mode,
        "workers": trace.workers,
        "prefill_worker": trace.prefill_worker,
        "decode_worker": trace.decode_worker,
        "reason": trace.reason,
        "ttft_s": round(trace.ttft_s, 6),
        "front_s": round(trace.front_s, 6),
        "queue_s": round(trace.queue_s, 6),
        "prefill_s": round(trace.prefill_s, 6),
        "transfer_s": round(trace.transfer_s, 6),
        "decode_s": round(trace.decode_s, 6),
        "cached_tokens": final.usage.cached_tokens,
        "num_preemptions": trace.num_preemptions,
        "fallback": trace.fallback or None,
    }


class Stream:
    """The events of one streamed answer.

    Most deltas bring text and nothing else. Their events differ in the text alone, so that all
    around it is rendered once for each choice.
    """

    def __init__(self, ask: Ask, model: str) -> None:
        self._ask = ask
        self._streaming = ask.streaming or Streaming()
        self._started: set[int] = set()
        self._num_tokens = 0
        kind = "chat.completion.chunk" if ask.is_chat else "text_completion"
        head = {"id": ask.generation.id, "object": kind, "created": int(time.time())}
        self._head = "data: " + dumps({**head, "model": model})[:-1]
        self._forms: dict[int, tuple[str, str]] = {}  # by choice: before its text, and after it
        self._has_forms = not (ask.return_token_ids or self._streaming.continuous_usage)

    def events(self, delta: Delta) -> bytes:
        """Everything to send for one delta: the role and echo before the first of a choice."""
        if delta.is_plain and (form := self._forms.get(delta.index)) is not None:
            return (form[0] + quoted(delta.text) + form[1]).encode()
        return self._in_full(delta)

    def _in_full(self, delta: Delta) -> bytes:
        parts = []
        self._num_tokens += len(delta.token_ids)
        is_first = delta.index not in self._started
        if is_first:
            self._started.add(delta.index)
            parts.append(self._first(delta))
            if self._has_forms:
                self._forms[delta.index] = self._form(delta.index)
        choice = self._choice(delta)
        if is_first and self._ask.return_token_ids:
            choice["prompt_token_ids"] = _prompt(self._ask, delta.index)
        so_far = {"usage": self._usage_so_far()} if self._streaming.continuous_usage else None
        parts.append(self._chunk([choice], delta.final, so_far))
        if delta.final is not None and self._streaming.usage:
            parts.append(self._chunk([], None, {"usage": usage_object(delta.final.usage)}))
        return "".join(parts).encode()

    def _form(self, index: int) -> tuple[str, str]:
        before, _, after = self._chunk([self._choice(Delta(index, MARK, ()))], None).rpartition(
            quoted(MARK)
        )
        return before, after

    def _choice(self, delta: Delta) -> Json:
        if self._ask.is_chat:
            return _chat_chunk(delta, self._ask)
        offset = len(_echo(self._ask, delta.index))
        bare = replace(delta, prompt=()) if delta.prompt else delta
        return _text_choice(delta.index, delta.text, [bare], self._ask, offset)

    def _usage_so_far(self) -> Json:
        num_prompt = sum(map(len, self._ask.generation.prompts))
        return usage_object(Usage(num_prompt, self._num_tokens, 0))

    def _first(self, delta: Delta) -> str:
        """The role, or the prompt when it is wanted back."""
        index = delta.index
        if self._ask.is_chat:
            choice = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            return self._chunk([choice], None)
        text = _echo(self._ask, index)
        if not text:
            return ""
        echoed = Delta(index, text, (), prompt=delta.prompt)
        return self._chunk([_text_choice(index, text, [echoed], self._ask, len(text))], None)

    def _chunk(self, choices: list[Json], final: Final | None, more: Json | None = None) -> str:
        body = f'{self._head},"choices":{dumps(choices)}'
        if final is not None:
            body += f',"evenflow":{dumps(evenflow_object(final))}'
        if more:
            body += "," + dumps(more)[1:-1]
        return body + "}\n\n"


def answer(ask: Ask, deltas: Sequence[Delta], model: str) -> Json:
    """The whole answer of a call that was not streamed."""
    generation = ask.generation
    by_index: dict[int, list[Delta]] = {index: [] for index in range(generation.num_choices)}
    for delta in deltas:
        by_index[delta.index].append(delta)
    final = deltas[-1].final
    assert final is not None, "the last delta carries the final"
    shows_prompt = ask.is_chat and ask.prompt_logprobs
    choices = []
    for index, own in by_index.items():
        text = "".join(delta.text for delta in own)
        if ask.is_chat:
            choices.append(_chat_choice(index, text, own, ask))
        else:
            echo = _echo(ask, index)
            choices.append(_text_choice(index, echo + text, own, ask, len(echo)))
        if ask.return_token_ids:
            choices[-1]["prompt_token_ids"] = _prompt(ask, index)
    return {
        "id": generation.id,
        "object": "chat.completion" if ask.is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage_object(final.usage),
        "evenflow": evenflow_object(final),
        **({"prompt_logprobs": _prompt_logprobs(deltas)} if shows_prompt else {}),
    }


def _echo(ask: Ask, index: int) -> str:
    return ask.echo[index // ask.generation.n] if ask.echo else ""


def _prompt(ask: Ask, index: int) -> list[int]:
    return list(ask.generation.prompts[index // ask.generation.n])


def _token_ids(deltas: Iterable[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def _text_choice(index: int, text: str, deltas: list[Delta], ask: Ask, offset: int) -> Json:
    entries = [entry for delta in deltas for entry in delta.logprobs]
    wanted = ask.generation.sampling.logprobs is not None
    echoed = deltas[0].prompt if ask.echo and wanted else ()
    logprobs = _text_logprobs(echoed, entries, offset, ask.num_top)
    choice: Json = {
        "index": index,
        "text": text,
        "logprobs": logprobs if entries or echoed else None,
        "finish_reason": deltas[-1].finish_reason,
        "stop_reason": deltas[-1].stop_reason,
    }
    if ask.prompt_logprobs:
        choice["prompt_logprobs"] = _prompt_logprobs(deltas)
    if ask.return_token_ids:
        choice["token_ids"] = _token_ids(deltas)
    return choice


def _chat_chunk(delta: Delta, ask: Ask) -> Json:
    content: Json = {"content": delta.text} if delta.text else {}
    if delta.calls:
        content["tool_calls"] = [_call_chunk(call) for call in delta.calls]
    choice: Json = {
        "index": delta.index,
        "delta": content,
        "logprobs": _chat_logprobs(delta.logprobs) if delta.logprobs else None,
        "finish_reason": delta.finish_reason,
    }
    if delta.finish_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    if ask.return_token_ids:
        choice["token_ids"] = list(delta.token_ids)
    return choice


def _chat_choice(index: int, text: str, deltas: list[Delta], ask: Ask) -> Json:
    entries = [entry for delta in deltas for entry in delta.logprobs]
    wanted = ask.generation.sampling.logprobs is not None
    choice: Json = {
        "index": index,
        "message": _message(text, deltas),
        "logprobs": _chat_logprobs(entries) if wanted else None,
        "finish_reason": deltas[-1].finish_reason,
        "stop_reason": deltas[-1].stop_reason,
    }
    if ask.return_token_ids:
        choice["token_ids"] = _token_ids(deltas)
    return choice


def _message(text: str, deltas: Iterable[Delta]) -> Json:
    calls: list[Json] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.name:
            calls.append(_call(call))
        else:
            calls[call.index]["function"]["arguments"] += call.arguments
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text or None, "tool_calls": calls}


def _call(call: CallDelta) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_chunk(call: CallDelta) -> Json:
    if call.name:
        return {"index": call.index, **_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _prompt_logprobs(deltas: Iterable[Delta]) -> list[Json | None]:
    """vLLM's shape: for each token of the prompt an object by token id; null for the first."""

    def entry(one: TokenText, rank: int) -> Json:
        return {"logprob": one.logprob, "rank": rank, "decoded_token": one.text}

    return [
        {str(one.id): entry(one, rank) for rank, one in enumerate(token.top, start=1)}
        | {str(token.token.id): entry(token.token, token.rank)}
        if token.rank
        else None
        for delta in deltas
        for token in delta.prompt
    ]


def _chat_logprobs(entries: Iterable[TokenLogprobs]) -> Json:
    def token(one: TokenText) -> Json:
        return {"token": one.text, "logprob": one.logprob, "bytes": list(one.bytes)}

    content = [
        {**token(entry.chosen), "top_logprobs": [token(one) for one in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(
    echoed: Sequence[PromptLogprob], entries: Sequence[TokenLogprobs], offset: int, num_top: int
) -> Json:
    """Completions' older shape: four parallel lists. Of what is echoed the first token has none."""

    def top(chosen: TokenText, others: Iterable[TokenText]) -> Json:
        listed = {one.text: one.logprob for one in others}
        return {chosen.text: chosen.logprob} | listed if num_top else {}

    chosen = [one.token for one in echoed] + [entry.chosen for entry in entries]
    tops: list[Json | None] = [top(one.token, one.top[:num_top]) for one in echoed]
    tops += [top(entry.chosen, entry.top) for entry in entries]
    logprobs: list[float | None] = [one.logprob for one in chosen]
    if echoed:
        logprobs[0] = tops[0] = None
    offsets = [one.offset for one in echoed] + [offset + entry.offset for entry in entries]
    return {
        "tokens": [one.text for one in chosen],
        "token_logprobs": logprobs,
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }
