"""The front door's protobuf messages: requests as the JSON bodies that mean the same, answers from
deltas and traces. It checks nothing: the intake does.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NoReturn

from protos import evenflow_pb2 as pb
from serving.errors import BadRequest
from serving.explain import lines
from serving.gateway import Gateway
from serving.generation import Delta, Final, PromptLogprob, TokenLogprobs, TokenText
from serving.messages import load_to_wire

Json = dict[str, Any]
OPTIONAL = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "priority"),
    *("truncate_prompt_tokens", "prompt_logprobs"),
)
REPEATED = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
DECISIONS = 12  # shown with the status
OBSERVED = ("ttft_s", "front_s", "itl_s", "worst_itl_s", "ttft_slo_s", "itl_slo_s", "margin")


# ---------------------------------------------------------------------------- requests


def completion_body(request: pb.GenerateRequest) -> Json:
    body = _options(request.options)
    kind = request.WhichOneof("prompt")
    if kind is not None:
        body["prompt"] = request.text if kind == "text" else list(request.token_ids.ids)
    if request.options.HasField("logprobs"):
        body["logprobs"] = request.options.logprobs
    return body


def chat_body(request: pb.ChatRequest) -> Json:
    body = _options(request.options) | _conversation(request.messages, request.tools)
    if request.options.HasField("logprobs"):
        body |= {"logprobs": True, "top_logprobs": request.options.logprobs}
    if (choice := request.tool_choice).startswith("="):
        body["tool_choice"] = {"type": "function", "function": {"name": choice[1:]}}
    elif choice:
        body["tool_choice"] = choice
    for name in ("parallel_tool_calls", "add_generation_prompt"):
        if request.HasField(name):
            body[name] = getattr(request, name)
    body["continue_final_message"] = request.continue_final_message
    return body


def tokenize_body(request: pb.TokenizeRequest) -> Json:
    if request.messages:
        return {"model": request.model, **_conversation(request.messages, request.tools)}
    return {"model": request.model, "prompt": request.text}


def _conversation(messages: Iterable[pb.Message], tools: Iterable[pb.Tool]) -> Json:
    return {
        "messages": [_message(message) for message in messages],
        "tools": [_tool(tool, i) for i, tool in enumerate(tools)],
    }


def _message(message: pb.Message) -> Json:
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    body: Json = {"role": message.role, "content": message.content, "name": message.name}
    if calls:
        body["tool_calls"] = calls
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body


def _tool(tool: pb.Tool, i: int) -> Json:
    function: Json = {"name": tool.name, "description": tool.description}
    if tool.parameters:
        function["parameters"] = _parsed(tool.parameters, f"tools[{i}].parameters")
    return {"type": "function", "function": function}


def _options(options: pb.Options) -> Json:
    body: Json = {"model": options.model, "ignore_eos": options.ignore_eos}
    body |= {name: getattr(options, name) for name in OPTIONAL if options.HasField(name)}
    body |= {name: list(values) for name in REPEATED if (values := getattr(options, name))}
    if options.logit_bias:
        body["logit_bias"] = {str(key): value for key, value in options.logit_bias.items()}
    if options.cache_salt:
        body["cache_salt"] = options.cache_salt
    body["include_stop_str_in_output"] = options.include_stop_str_in_output
    slo = {
        name: getattr(options, f"slo_{name}")
        for name in ("ttft_ms", "itl_ms")
        if options.HasField(f"slo_{name}")
    }
    body["evenflow"] = {"mode": options.mode, "slo": slo}
    return body | _form(options)


def _form(options: pb.Options) -> Json:
    match options.WhichOneof("form"):
        case "json_schema":
            return {"guided_json": _parsed(options.json_schema, "options.json_schema")}
        case "regex":
            return {"guided_regex": options.regex}
        case "choices":
            return {"guided_choice": list(options.choices.texts)}
        case "grammar":
            return {"guided_grammar": options.grammar}
    return {}


def _parsed(text: str, param: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise BadRequest(f"{param} is not JSON", param) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# ---------------------------------------------------------------------------- answers


def response(request_id: str, delta: Delta) -> pb.GenerateResponse:
    if delta.is_plain:
        return pb.GenerateResponse(
            request_id=request_id, index=delta.index, text=delta.text, token_ids=delta.token_ids
        )
    message = pb.GenerateResponse(
        request_id=request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=map(_logprobs, delta.logprobs),
        finish_reason=delta.finish_reason or "",
        final=_final(delta.final) if delta.final else None,
        prompt_logprobs=[_prompt_logprobs(entry) for entry in delta.prompt if entry.rank],
        tool_calls=[pb.ToolCallDelta(**asdict(call)) for call in delta.calls],
    )
    if isinstance(delta.stop_reason, str):
        message.stop = delta.stop_reason
    elif delta.stop_reason is not None:
        message.stop_token_id = delta.stop_reason
    return message


def _token(token: TokenText) -> pb.Logprob:
    return pb.Logprob(
        token_id=token.id, token=token.text, token_bytes=token.bytes, logprob=token.logprob
    )


def _logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(chosen=_token(entry.chosen), top=map(_token, entry.top))


def _prompt_logprobs(entry: PromptLogprob) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(token=_token(entry.token), rank=entry.rank, top=map(_token, entry.top))


def _final(final: Final) -> pb.Final:
    usage = final.usage
    return pb.Final(
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        route=route(asdict(final.trace)),
    )


def route(trace: Json) -> pb.Route:
    return pb.Route(**{field.name: trace[field.name] for field in pb.Route.DESCRIPTOR.fields})


def explanation(found: Json) -> pb.Explanation:
    fields = [field.name for field in pb.Way.DESCRIPTOR.fields]
    return pb.Explanation(
        request_id=found["request_id"],
        route=route(found),
        outcome=found["outcome"],
        ways=[pb.Way(**{name: way[name] for name in fields}) for way in found["candidates"]],
        text="\n".join(lines(found)),
        **{name: found[name] for name in OBSERVED},
    )


def status(gateway: Gateway, tenant: str) -> pb.Status:
    workers = [
        pb.WorkerStatus(
            id=view.id, role=view.role, load=load_to_wire(view.load), is_leaving=view.is_leaving
        )
        for view in gateway.pools.workers()
    ]
    recent = gateway.recent(tenant)[:DECISIONS]
    names = [field.name for field in pb.Decision.DESCRIPTOR.fields]
    scaling = gateway.scaler.status() if gateway.scaler is not None else {"targets": {}}
    return pb.Status(
        model=gateway.model,
        workers=workers,
        ready=gateway.is_ready,
        num_calls=gateway.num_calls,
        decisions=[pb.Decision(**{name: call[name] for name in names}) for call in recent],
        targets=scaling["targets"],
    )
