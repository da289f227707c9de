"""The one validation behind HTTP and gRPC: a plain object of parameters to a checked Generation.

Bad input ends here, with the name of the parameter. Nothing here knows a web framework.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.api.fields import Fields, as_text, is_number, wrong
from serving.errors import BadRequest, ModelNotFound, PromptTooLong
from serving.gateway import Gateway, Limits
from serving.generation import AUTO, MODES, Generation
from serving.tokenizer import TemplateFailed
from workers.core.request import SLO, Sampling

logger = logging.getLogger(__name__)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_STOP_IDS = 256
MAX_PROMPTS = 256  # in one call
INLINE_CHARS = 2_000  # longer texts are encoded on a thread
MAX_TOKENS = 2**31 - 1
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Read by clients or proxies only: accepted, and of no effect here.
IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier")


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """What an operator decides about the front door."""

    model: str  # the name that clients use
    aliases: frozenset[str] = frozenset()
    max_body_bytes: int = 32 << 20
    max_n: int = 16
    slo: SLO = field(default_factory=SLO)
    debug: bool = False  # requests may pin their workers
    api_keys: frozenset[str] = frozenset()  # empty: everybody may


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request: what to generate, and how the answer is to look."""

    generation: Generation
    is_chat: bool
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    echo: tuple[str, ...] = ()  # the prompts as text, when they are wanted back
    num_top: int = 0


class Intake:
    """Checks requests against what this gateway serves."""

    def __init__(self, gateway: Gateway, settings: FrontSettings) -> None:
        self.gateway = gateway
        self.settings = settings
        self._tokenizer = gateway.tokenizer

    async def completion(
        self, body: Any, *, headers: Mapping[str, str] | None = None, request_id: str = ""
    ) -> Ask:
        """Continue one or more prompts."""
        fields = _fields(body)
        arrived_at = self.gateway.clock()
        self.check_model(fields.text("model"))
        limits = self.gateway.limits()
        stream, include_usage = _streaming(fields)
        logprobs = fields.optional_integer("logprobs", 0, MAX_LOGPROBS)
        echo = fields.flag("echo")
        if echo and logprobs is not None:
            raise wrong("echo", "with logprobs is not offered: prompt logprobs are not computed")
        if fields.text("suffix"):
            raise wrong("suffix", "is not offered: this model cannot fill in the middle")
        prompts, texts = await self._prompts(fields.raw("prompt"), echo)
        shape = self._shape(fields)
        best_of = fields.optional_integer("best_of", 1, self.settings.max_n)
        if best_of is not None and best_of != shape.n:
            raise wrong("best_of", "must equal n")
        max_tokens = fields.integer("max_tokens", COMPLETION_MAX_TOKENS, 1, MAX_TOKENS)
        generation = self._generation(
            fields, shape, prompts, max_tokens, logprobs, limits, headers or {}, arrived_at,
            _names("cmpl", request_id),
        )  # fmt: skip
        return_token_ids = fields.flag("return_token_ids")
        self._count_unknown(fields)
        return Ask(generation, False, stream, include_usage, return_token_ids, texts, logprobs or 0)

    async def chat(
        self, body: Any, *, headers: Mapping[str, str] | None = None, request_id: str = ""
    ) -> Ask:
        """Answer a conversation."""
        fields = _fields(body)
        arrived_at = self.gateway.clock()
        self.check_model(fields.text("model"))
        limits = self.gateway.limits()
        stream, include_usage = _streaming(fields)
        top = fields.optional_integer("top_logprobs", 0, MAX_LOGPROBS)
        wants_logprobs = fields.flag("logprobs")
        if top is not None and not wants_logprobs:
            raise wrong("top_logprobs", "needs logprobs: true")
        logprobs = (top or 0) if wants_logprobs else None
        _refuse_tools(fields)
        messages = self._messages(fields.raw("messages"))
        prompt = await self.render(messages)
        self._check_prompt(prompt, "messages", limits)
        room = _room(len(prompt), limits)
        asked = fields.optional_integer("max_completion_tokens", 1, MAX_TOKENS)
        max_tokens = fields.optional_integer("max_tokens", 1, MAX_TOKENS)
        max_tokens = asked or max_tokens or room
        generation = self._generation(
            fields, self._shape(fields), (prompt,), max_tokens, logprobs, limits, headers or {},
            arrived_at, _names("chatcmpl", request_id),
        )  # fmt: skip
        return_token_ids = fields.flag("return_token_ids")
        self._count_unknown(fields)
        return Ask(generation, True, stream, include_usage, return_token_ids, (), logprobs or 0)

    async def tokenize(self, body: Any) -> tuple[int, ...]:
        """Text, or a conversation as the chat template renders it, to token ids."""
        fields = _fields(body)
        self.check_model(fields.text("model"))
        if fields.raw("messages") is not None:
            return await self.render(self._messages(fields.raw("messages")))
        special = fields.flag("add_special_tokens", True)
        text = fields.raw("prompt")
        if text is None:
            raise wrong("prompt", "is missing")
        return await self.encode(as_text(text, "prompt"), add_special_tokens=special)

    def detokenize(self, body: Any) -> str:
        fields = _fields(body)
        self.check_model(fields.text("model"))
        ids = fields.raw("tokens")
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise wrong("tokens", "must be a list of token ids")
        return self._tokenizer.decode(self._ids(ids, "tokens"), skip_special_tokens=False)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        encode = self._tokenizer.encode
        if len(text) <= INLINE_CHARS:
            return tuple(encode(text, add_special_tokens=add_special_tokens))
        return tuple(await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens))

    async def render(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """A conversation as the model wants to see it, in token ids."""
        try:
            text = self._tokenizer.render(messages)
        except TemplateFailed as error:
            raise BadRequest(str(error), "messages") from error
        return await self.encode(text, add_special_tokens=False)

    # ------------------------------------------------------------------ prompts

    async def _prompts(
        self, prompt: Any, echo: bool
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """The four shapes of OpenAI's ``prompt``; the texts too when they are to be echoed."""
        if prompt is None:
            raise wrong("prompt", "is missing")
        if isinstance(prompt, str):
            items: list[Any] = [prompt]
        elif not isinstance(prompt, Sequence):
            raise wrong("prompt", "must be a string, a list of strings, or lists of token ids")
        elif not prompt:
            raise wrong("prompt", "is empty")
        else:
            items = list(prompt) if isinstance(prompt[0], str | Sequence) else [prompt]
        if len(items) > MAX_PROMPTS:
            raise wrong("prompt", f"holds {len(items)} prompts; at most {MAX_PROMPTS} are taken")
        ids, texts = [], []
        for item in items:
            if isinstance(item, str):
                text = as_text(item, "prompt")
                one = await self.encode(text, add_special_tokens=True)
            elif isinstance(item, Sequence):
                one = self._ids(item, "prompt")
                text = self._tokenizer.decode(one, skip_special_tokens=False) if echo else ""
            else:
                raise wrong("prompt", "mixes token ids with other things")
            if not one:  # a tokenizer that adds a start token makes the empty text a prompt
                raise wrong("prompt", "is empty: there is no token to continue from")
            ids.append(one)
            texts.append(text)
        return tuple(ids), tuple(texts) if echo else ()

    def _ids(self, ids: Sequence[Any], param: str) -> tuple[int, ...]:
        vocab_size = self._tokenizer.vocab_size
        for value in ids:
            if isinstance(value, bool) or not isinstance(value, int):
                raise wrong(param, "must hold integers only where it holds token ids")
            if not 0 <= value < vocab_size:
                shown = value if abs(value) < 2**63 else "a number"
                raise wrong(param, f"holds {shown}, outside the vocabulary of {vocab_size} tokens")
        return tuple(ids)

    def _messages(self, messages: Any) -> list[dict[str, Any]]:
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise wrong("messages", "must be a list with at least one message")
        return [self._message(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _message(self, message: Any, path: str) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise wrong(path, "must be an object")
        fields = Fields(message, f"{path}.")
        role = fields.text("role")
        if not role:
            raise wrong(f"{path}.role", "is missing")
        checked = {"role": role, "content": _content(fields.raw("content"), f"{path}.content")}
        if name := fields.text("name"):
            checked["name"] = name
        self._count_unknown(fields)
        return checked

    # ------------------------------------------------------------------ limits

    def check_model(self, model: str) -> None:
        """An empty name means the one that is served. Raises ModelNotFound."""
        settings = self.settings
        if model and model != settings.model and model not in settings.aliases:
            raise ModelNotFound(
                f"the model {model[:100]!r} does not exist; this server has {settings.model!r}",
                "model",
            )

    def _check_prompt(self, prompt: Sequence[int], param: str, limits: Limits) -> None:
        if len(prompt) >= limits.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens; the context of {limits.max_model_len} has "
                "to hold it and at least one more",
                param,
            )
        if len(prompt) > limits.pool_tokens:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens; an empty KV pool holds {limits.pool_tokens}",
                param,
            )

    def _check_total(self, prompt: Sequence[int], max_tokens: int, limits: Limits) -> None:
        total = len(prompt) + max_tokens
        what = f"{len(prompt)} prompt tokens and max_tokens of {max_tokens}"
        if total > limits.max_model_len:
            raise PromptTooLong(
                f"{what} exceed the context of {limits.max_model_len}", "max_tokens"
            )
        if total - 1 > limits.pool_tokens:  # the last token sampled is never computed
            raise PromptTooLong(
                f"{what} exceed the {limits.pool_tokens} tokens that an empty KV pool holds",
                "max_tokens",
            )

    # ------------------------------------------------------------------ options

    def _shape(self, fields: Fields) -> "_Shape":
        seed = fields.optional_integer("seed", -(2**63), 2**64 - 1)
        stop_ids = fields.raw("stop_token_ids")
        if stop_ids is not None and (
            isinstance(stop_ids, str) or not isinstance(stop_ids, Sequence)
        ):
            raise fields.wrong("stop_token_ids", "must be a list of token ids")
        if stop_ids and len(stop_ids) > MAX_STOP_IDS:
            raise fields.wrong("stop_token_ids", f"may hold at most {MAX_STOP_IDS} ids")
        return _Shape(
            n=fields.integer("n", 1, 1, self.settings.max_n),
            seed=secrets.randbits(63) if seed is None else seed % 2**64,
            stop=_stops(fields.raw("stop")),
            stop_ids=frozenset(self._ids(stop_ids or (), "stop_token_ids")),
            ignore_eos=fields.flag("ignore_eos"),
        )

    def _generation(
        self,
        fields: Fields,
        shape: "_Shape",
        prompts: tuple[tuple[int, ...], ...],
        max_tokens: int,
        logprobs: int | None,
        limits: Limits,
        headers: Mapping[str, str],
        arrived_at: float,
        names: tuple[str, str],
    ) -> Generation:
        for prompt in prompts:
            self._check_prompt(prompt, "prompt", limits)
            self._check_total(prompt, max_tokens, limits)
        if len(prompts) * shape.n > MAX_PROMPTS:
            raise wrong("n", f"times the number of prompts must be at most {MAX_PROMPTS}")
        sampling = Sampling(
            max_tokens=max_tokens,
            min_tokens=fields.integer("min_tokens", 0, 0, max_tokens),
            temperature=fields.number("temperature", 1.0, 0.0, 2.0),
            top_p=_top_p(fields),
            top_k=max(0, fields.integer("top_k", 0, -1, 2**31 - 1)),
            min_p=fields.number("min_p", 0.0, 0.0, 1.0),
            seed=shape.seed,
            presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
            frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
            repetition_penalty=_repetition_penalty(fields),
            logit_bias=self._logit_bias(fields),
            stop_ids=shape.stop_ids | (frozenset() if shape.ignore_eos else self._eos_ids),
            logprobs=logprobs,
        )
        id, key = names
        return Generation(
            id=id,
            key=key,
            prompts=prompts,
            sampling=sampling,
            arrived_at=arrived_at,
            n=shape.n,
            stop=shape.stop,
            include_stop=fields.flag("include_stop_str_in_output"),
            stop_token_ids=shape.stop_ids,
            **self._placement(fields, headers),
        )

    @property
    def _eos_ids(self) -> frozenset[int]:
        return self._tokenizer.eos_ids

    def _logit_bias(self, fields: Fields) -> tuple[tuple[int, float], ...]:
        value = fields.raw("logit_bias")
        if value is None:
            return ()
        if not isinstance(value, Mapping):
            raise wrong("logit_bias", "must map token ids to numbers")
        biases = {}
        for key, bias in value.items():
            if not re.fullmatch(r"[0-9]{1,10}", str(key)):
                raise wrong("logit_bias", "has a key that is not a token id")
            if int(key) >= self._tokenizer.vocab_size:
                size = self._tokenizer.vocab_size
                raise wrong("logit_bias", f"has {key}, outside the vocabulary of {size} tokens")
            if not is_number(bias) or not -100 <= bias <= 100:
                raise wrong("logit_bias", "has a value that is not between -100 and 100")
            biases[int(key)] = float(bias)
        return tuple(biases.items())

    def _placement(self, fields: Fields, headers: Mapping[str, str]) -> dict[str, Any]:
        """Mode, objectives, priority and pinned workers, from the body or else from headers."""
        ours = fields.section("evenflow")
        slo = ours.section("slo")
        default = self.settings.slo
        mode = ours.text("mode") or headers.get("x-evenflow-mode", "") or AUTO
        if mode not in MODES:
            raise wrong("evenflow.mode", f"must be one of {', '.join(MODES)}")
        ttft_ms = _objective(slo, "ttft_ms", headers.get("x-slo-ttft-ms"))
        itl_ms = _objective(slo, "itl_ms", headers.get("x-slo-itl-ms"))
        priority = fields.integer("priority", 0, -(2**31), 2**31 - 1)
        placement = {
            "mode": mode,
            "slo": SLO(
                default.ttft_s if ttft_ms is None else ttft_ms / 1e3,
                default.itl_s if itl_ms is None else itl_ms / 1e3,
            ),
            "priority": ours.integer("priority", priority, -(2**31), 2**31 - 1),
            "pinned": self._pinned(ours.raw("worker"), headers.get("x-evenflow-worker", "")),
        }
        self._count_unknown(slo)
        self._count_unknown(ours)
        return placement

    def _pinned(self, workers: Any, header: str) -> tuple[str, ...]:
        param = "evenflow.worker"
        if workers is None:
            workers = [name.strip() for name in header.split(",") if name.strip()]
        if isinstance(workers, str):
            workers = [workers]
        if not isinstance(workers, Sequence):
            raise wrong(param, "must be a worker id, or two: prefill and decode")
        names = tuple(as_text(worker, param) for worker in workers)
        if names and not self.settings.debug:
            raise wrong(param, "is for tests: this server was not started with debug on")
        if len(names) > 2:
            raise wrong(param, "names more than two workers")
        return names

    def _count_unknown(self, fields: Fields) -> None:
        for name in IGNORED:
            fields.raw(name)
        if unknown := fields.unknown():
            self.gateway.metrics.ignored(len(unknown))
            logger.debug("ignored fields: %s", ", ".join(fields.name(u)[:64] for u in unknown[:16]))


@dataclass(frozen=True, slots=True)
class _Shape:
    """The options that are not the engine's alone."""

    n: int
    seed: int
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool


def _fields(body: Any) -> Fields:
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    return Fields(body)


def _streaming(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether usage comes with it."""
    stream = fields.flag("stream")
    options = fields.section("stream_options")
    if fields.raw("stream_options") is not None and not stream:
        raise wrong("stream_options", "is only allowed with stream: true")
    return stream, options.flag("include_usage")


def _names(prefix: str, request_id: str) -> tuple[str, str]:
    """The public id, and one that no other client can choose for the workers."""
    token = secrets.token_hex(12)
    if not request_id:
        return f"{prefix}-{token}", f"{prefix}-{token}"
    if not REQUEST_ID.fullmatch(request_id):
        raise wrong("request_id", "may hold 1 to 128 letters, digits and ._:/+=@-")
    return request_id, f"{request_id}~{token[:8]}"


def _content(content: Any, path: str) -> str:
    """A string, or parts that are all text."""
    if isinstance(content, str):
        return as_text(content, path)
    if not isinstance(content, Sequence) or not content:
        raise wrong(path, "must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        where = f"{path}[{i}]"
        if not isinstance(part, Mapping):
            raise wrong(where, "must be an object")
        if part.get("type") != "text":
            raise wrong(f"{where}.type", "must be text: this model reads nothing else")
        texts.append(as_text(part.get("text"), f"{where}.text"))
    return "".join(texts)


def _refuse_tools(fields: Fields) -> None:
    """Options whose effect a client would miss are refused; those without one are ignored."""
    if fields.raw("tools") and fields.raw("tool_choice") != "none":
        raise wrong("tools", "are not offered by this server")
    fields.raw("tool_choice")
    form = fields.section("response_format")
    if form.text("type", "text") != "text":
        raise wrong("response_format", "other than text is not offered by this server")


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, Sequence) or len(stops) > MAX_STOPS:
        raise wrong("stop", f"must be a string or a list of at most {MAX_STOPS} strings")
    for stop in stops:
        if not 0 < len(as_text(stop, "stop")) <= MAX_STOP_CHARS:
            raise wrong("stop", f"strings must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _top_p(fields: Fields) -> float:
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise fields.wrong("top_p", "must be above 0")
    return top_p


def _repetition_penalty(fields: Fields) -> float:
    penalty = fields.number("repetition_penalty", 1.0, 0.0, 100.0)
    if penalty == 0.0:
        raise fields.wrong("repetition_penalty", "must be above 0")
    return penalty


def _objective(slo: Fields, name: str, header: str | None) -> float | None:
    """Milliseconds above zero; the body goes before the header."""
    value = slo.optional_number(name, 0.0, 1e9)
    if value is None and header:
        try:
            value = Fields({name: float(header)}, "x-slo.").optional_number(name, 0.0, 1e9)
        except ValueError:
            raise wrong(f"x-slo-{name.replace('_', '-')}", "must be a number") from None
    if value == 0.0:
        raise slo.wrong(name, "must be above 0")
    return value


def _room(prompt_tokens: int, limits: Limits) -> int:
    """Tokens an answer of no stated length may have: what any worker can hold, if the prompt does
    not need a larger one."""
    if prompt_tokens < limits.common_tokens:
        return limits.common_tokens - prompt_tokens
    return min(limits.max_model_len, limits.pool_tokens + 1) - prompt_tokens
