"""The one validation behind HTTP and gRPC: a plain object of parameters to a checked Generation.

Bad input ends here, with the name of the parameter. Nothing here knows a web framework.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from serving.api.conversation import Conversation, read_conversation
from serving.api.fields import Fields, as_text, wrong
from serving.api.form import checked, read_form
from serving.api.options import MAX_LOGPROBS, MAX_TOKENS, Options, read_options, token_ids
from serving.api.settings import FrontSettings
from serving.api.tools import CallReader, ToolUse, read_tools
from serving.auth import ANYBODY, ApiKey
from serving.errors import BadRequest, Forbidden, ModelNotFound, NotFound, PromptTooLong
from serving.gateway import Gateway, Limits
from serving.generation import Delta, Generation

logger = logging.getLogger(__name__)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 256  # in one call, and answers to them
INLINE_CHARS = 2_000  # longer texts are encoded on a thread
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Read by clients or proxies only: accepted, and of no effect here.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier")


@dataclass(frozen=True, slots=True)
class Streaming:
    """What a stream carries besides the answer."""

    usage: bool = False  # an event of its own at the end
    continuous_usage: bool = False  # with every event


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request: what to generate, and how the answer is to look."""

    generation: Generation
    is_chat: bool
    streaming: Streaming | None = None  # None: one whole answer
    return_token_ids: bool = False
    echo: tuple[str, ...] = ()  # the prompts as text, when they are wanted back
    num_top: int = 0
    prompt_logprobs: bool = False  # an entry of their own in the answer
    tools: ToolUse | None = None  # that the answer may call
    caller: ApiKey = ANYBODY


@dataclass(frozen=True, slots=True)
class _Head:
    """What every request for tokens begins with."""

    fields: Fields
    arrived_at: float
    limits: Limits
    streaming: Streaming | None
    names: tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Options that completions and chats write differently."""

    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None


class Intake:
    """Checks requests against what this gateway serves and what their key may use."""

    def __init__(self, gateway: Gateway, settings: FrontSettings) -> None:
        self.gateway = gateway
        self.settings = settings
        self._tokenizer = gateway.tokenizer

    async def completion(
        self,
        body: Any,
        *,
        caller: ApiKey = ANYBODY,
        headers: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> Ask:
        """Continue one or more prompts."""
        head = self._head(body, "cmpl", request_id)
        fields, limits = head.fields, head.limits
        logprobs = fields.optional_integer("logprobs", 0, MAX_LOGPROBS)
        echo = fields.flag("echo")
        if fields.text("suffix"):
            raise wrong("suffix", "is not offered: this model cannot fill in the middle")
        keep = fields.optional_integer("truncate_prompt_tokens", -1, MAX_TOKENS)
        prompts, texts = await self._prompts(fields.raw("prompt"), echo, _kept(keep, limits))
        max_tokens = fields.integer("max_tokens", COMPLETION_MAX_TOKENS, 1, MAX_TOKENS)
        for prompt in prompts:
            self._check_prompt(prompt, "prompt", limits)
            self._check_total(prompt, max_tokens, limits)
        grammar = await read_form(fields, self.settings.grammars)
        asked = _Numbers(max_tokens, logprobs, _prompt_logprobs(fields, head.streaming))
        if echo and logprobs is not None:
            asked = replace(asked, prompt_logprobs=max(logprobs, asked.prompt_logprobs or 0))
        options = self._options(fields, headers, asked, grammar)
        best_of = fields.optional_integer("best_of", 1, self.settings.max_n)
        if best_of is not None and best_of != options.n:
            raise wrong("best_of", "must equal n")
        return self._ask(head, prompts, options, caller, is_chat=False, echo=texts)

    async def chat(
        self,
        body: Any,
        *,
        caller: ApiKey = ANYBODY,
        headers: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> Ask:
        """Answer a conversation."""
        head = self._head(body, "chatcmpl", request_id)
        fields, limits = head.fields, head.limits
        top = fields.optional_integer("top_logprobs", 0, MAX_LOGPROBS)
        wants_logprobs = fields.flag("logprobs")
        if top is not None and not wants_logprobs:
            raise wrong("top_logprobs", "needs logprobs: true")
        tools = read_tools(fields, self._tokenizer)
        conversation = read_conversation(fields, tools.shown if tools else ())
        keep = fields.optional_integer("truncate_prompt_tokens", -1, MAX_TOKENS)
        prompt = _last(await self.render(conversation), _kept(keep, limits))
        self._check_prompt(prompt, "messages", limits)
        given = fields.optional_integer("max_completion_tokens", 1, MAX_TOKENS)
        given = given or fields.optional_integer("max_tokens", 1, MAX_TOKENS)
        max_tokens = given or _room(len(prompt), limits)
        self._check_total(prompt, max_tokens, limits)
        grammar = await read_form(fields, self.settings.grammars)
        if tools and grammar:
            raise wrong("tools", "cannot be called by an answer that is held to another form")
        if tools and tools.grammar:
            grammar = await checked(tools.grammar, "tools", self.settings.grammars)
        logprobs = (top or 0) if wants_logprobs else None
        asked = _Numbers(max_tokens, logprobs, _prompt_logprobs(fields, head.streaming))
        options = self._options(fields, headers, asked, grammar)
        return self._ask(head, (prompt,), options, caller, is_chat=True, tools=tools)

    async def answer(self, ask: Ask) -> AsyncGenerator[Delta, None]:
        """What the gateway generates, counted against the caller's limit. Use ``aclosing``."""
        reader = CallReader(ask.tools, ask.generation.num_choices) if ask.tools else None
        async with aclosing(self.gateway.generate(ask.generation)) as deltas:
            async for delta in deltas:
                self.settings.keys.charge(ask.caller, len(delta.token_ids), self.gateway.clock())
                read = delta if reader is None else reader.read(delta)
                if read is not None:
                    yield read

    def abort(self, request_id: str, caller: ApiKey = ANYBODY) -> None:
        """Idempotent; other tenants' requests are unknown ones."""
        self.gateway.abort(request_id, caller.tenant)

    async def explain(self, request_id: str, caller: ApiKey = ANYBODY) -> dict[str, Any]:
        """Raises NotFound, for other tenants' requests too."""
        explanation = await self.gateway.explain(request_id, caller.tenant)
        if explanation is None:
            raise NotFound(f"no request {request_id[:128]!r} is running or recent here")
        return explanation

    async def set_role(self, worker: str, role: str, caller: ApiKey = ANYBODY) -> None:
        """Raises Forbidden, NotFound, BadRequest."""
        check_admin(caller)
        await self.gateway.moves.set_role(worker, role)

    async def drain(self, worker: str, caller: ApiKey = ANYBODY) -> None:
        """Raises Forbidden, NotFound."""
        check_admin(caller)
        await self.gateway.moves.drain(worker)

    async def scale(self, pool: str, workers: int, caller: ApiKey = ANYBODY) -> None:
        """Raises Forbidden, NotFound, BadRequest."""
        check_admin(caller)
        if self.gateway.scaler is None:
            raise NotFound("no pool is scaled here: start it with a range, --scaling-mixed 1-4")
        await self.gateway.scaler.scale(pool, workers)

    def move(self, request_id: str, worker: str, caller: ApiKey = ANYBODY) -> None:
        """A running request goes on there. Raises Forbidden, NotFound."""
        check_admin(caller)
        if not self.gateway.move(request_id, worker):
            raise NotFound(f"no request {request_id[:128]!r} is running here")

    async def tokenize(self, body: Any) -> tuple[int, ...]:
        """Text, or a conversation as the chat template renders it, to token ids."""
        fields = _fields(body)
        self.check_model(fields.text("model"))
        if fields.raw("messages") is not None:
            tools = read_tools(fields, self._tokenizer)
            return await self.render(read_conversation(fields, tools.shown if tools else ()))
        special = fields.flag("add_special_tokens", True)
        text = fields.raw("prompt")
        if text is None:
            raise wrong("prompt", "is missing")
        checked_text = as_text(text, "prompt")
        self._check_length(checked_text, "prompt")
        return await self.encode(checked_text, add_special_tokens=special)

    async def detokenize(self, body: Any) -> str:
        fields = _fields(body)
        self.check_model(fields.text("model"))
        ids = fields.raw("tokens")
        if isinstance(ids, Sequence) and not isinstance(ids, str):
            self._check_prompt(ids, "tokens", self.gateway.limits())  # before looking at each
        checked_ids = token_ids(ids, self._tokenizer.vocab_size, "tokens")
        return await asyncio.to_thread(
            self._tokenizer.decode, checked_ids, skip_special_tokens=False
        )

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        encode = self._tokenizer.encode
        if len(text) <= INLINE_CHARS:
            return tuple(encode(text, add_special_tokens=add_special_tokens))
        return tuple(await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens))

    async def render(self, conversation: Conversation) -> tuple[int, ...]:
        """As the model wants to see it, in token ids."""
        text = conversation.text(self._tokenizer)
        self._check_length(text, "messages")
        return await self.encode(text, add_special_tokens=False)

    # ------------------------------------------------------------------ prompts

    async def _prompts(
        self, prompt: Any, echo: bool, keep: int | None
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
                self._check_length(text, "prompt")
                one = await self.encode(text, add_special_tokens=True)
            elif isinstance(item, Sequence):
                item = _last(item, keep)
                self._check_prompt(item, "prompt", self.gateway.limits())  # before looking at each
                one = token_ids(item, self._tokenizer.vocab_size, "prompt")
                text = self._tokenizer.decode(one, skip_special_tokens=False) if echo else ""
            else:
                raise wrong("prompt", "mixes token ids with other things")
            one = _last(one, keep)
            if not one:  # a tokenizer that adds a start token makes the empty text a prompt
                raise wrong("prompt", "is empty: there is no token to continue from")
            ids.append(one)
            texts.append(text)
        return tuple(ids), tuple(texts) if echo else ()

    # ------------------------------------------------------------------ limits

    def check_model(self, model: str) -> None:
        """An empty name means the one that is served. Raises ModelNotFound."""
        settings = self.settings
        if model and model != settings.model and model not in settings.aliases:
            raise ModelNotFound(
                f"the model {model[:100]!r} does not exist; this server has {settings.model!r}",
                "model",
            )

    def _check_length(self, text: str, param: str) -> None:
        """Refuse what is too long in any encoding without encoding it."""
        if (at_least := self._tokenizer.min_tokens(text)) >= self.gateway.limits().max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, at least {at_least} tokens; the context "
                f"has {self.gateway.limits().max_model_len}",
                param,
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

    # ------------------------------------------------------------------ both kinds of call

    def _head(self, body: Any, prefix: str, request_id: str) -> _Head:
        fields = _fields(body)
        arrived_at = self.gateway.clock()
        self.check_model(fields.text("model"))
        names = _names(prefix, request_id)
        return _Head(fields, arrived_at, self.gateway.limits(), _streaming(fields), names)

    def _options(
        self,
        fields: Fields,
        headers: Mapping[str, str] | None,
        asked: _Numbers,
        grammar: str,
    ) -> Options:
        return read_options(
            fields,
            headers or {},
            self.settings,
            self._tokenizer,
            max_tokens=asked.max_tokens,
            logprobs=asked.logprobs,
            prompt_logprobs=asked.prompt_logprobs,
            grammar=grammar,
        )

    def _ask(
        self,
        head: _Head,
        prompts: tuple[tuple[int, ...], ...],
        options: Options,
        caller: ApiKey,
        *,
        is_chat: bool,
        echo: tuple[str, ...] = (),
        tools: ToolUse | None = None,
    ) -> Ask:
        fields = head.fields
        return_token_ids = fields.flag("return_token_ids")
        if len(prompts) * options.n > MAX_PROMPTS:
            raise wrong("n", f"times the number of prompts must be at most {MAX_PROMPTS}")
        self._count_unknown(fields)
        self.settings.keys.admit(caller, sum(map(len, prompts)), self.gateway.clock())
        return Ask(
            _generation(head, prompts, options, caller),
            is_chat=is_chat,
            streaming=head.streaming,
            return_token_ids=return_token_ids,
            echo=echo,
            num_top=options.sampling.logprobs or 0,
            prompt_logprobs=fields.raw("prompt_logprobs") is not None,
            tools=tools,
            caller=caller,
        )

    def _count_unknown(self, fields: Fields) -> None:
        for name in IGNORED:
            fields.raw(name)
        if unknown := fields.unknown():
            self.gateway.metrics.ignored(len(unknown))
            logger.debug("ignored fields: %s", ", ".join(name[:64] for name in unknown[:16]))


def _fields(body: Any) -> Fields:
    if not isinstance(body, Mapping):
        raise BadRequest("the body must be a JSON object")
    return Fields(body)


def _streaming(fields: Fields) -> Streaming | None:
    stream = fields.flag("stream")
    options = fields.section("stream_options")
    if fields.raw("stream_options") is not None and not stream:
        raise wrong("stream_options", "is only allowed with stream: true")
    usage = options.flag("include_usage")
    continuous = options.flag("continuous_usage_stats")
    return Streaming(usage, usage and continuous) if stream else None


def _names(prefix: str, request_id: str) -> tuple[str, str]:
    """The public id, and one that no other client can choose for the workers."""
    token = secrets.token_hex(12)
    if not request_id:
        return f"{prefix}-{token}", f"{prefix}-{token}"
    if not REQUEST_ID.fullmatch(request_id):
        raise wrong("request_id", "may hold 1 to 128 letters, digits and ._:/+=@-")
    return request_id, f"{request_id}~{token[:8]}"


def _kept(keep: int | None, limits: Limits) -> int | None:
    """How many of a prompt's last tokens are used; -1 means what the context takes."""
    return limits.max_model_len - 1 if keep == -1 else keep


def _last(prompt: Sequence[int], keep: int | None) -> tuple[int, ...]:
    return tuple(prompt if keep is None else prompt[max(0, len(prompt) - keep) :])


def _prompt_logprobs(fields: Fields, streaming: Streaming | None) -> int | None:
    asked = fields.optional_integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if asked is not None and streaming is not None:
        raise wrong("prompt_logprobs", "are not available with stream: true")
    return asked


def _generation(
    head: _Head, prompts: tuple[tuple[int, ...], ...], options: Options, caller: ApiKey
) -> Generation:
    salt = f"{caller.tenant}/{options.cache_salt}" if caller.tenant else options.cache_salt
    return Generation(
        id=head.names[0],
        key=head.names[1],
        prompts=prompts,
        arrived_at=head.arrived_at,
        sampling=options.sampling,
        n=options.n,
        stop=options.stop,
        include_stop=options.include_stop,
        stop_token_ids=options.stop_token_ids,
        mode=options.mode,
        pinned=options.pinned,
        slo=options.slo,
        priority=options.priority,
        cache_salt=salt,
        tenant=caller.tenant,
        traceparent=options.traceparent,
    )


def _room(prompt_tokens: int, limits: Limits) -> int:
    """Tokens an answer of no stated length may have: what any worker can hold, if the prompt does
    not need a larger one."""
    if prompt_tokens < limits.common_tokens:
        return limits.common_tokens - prompt_tokens
    return min(limits.max_model_len, limits.pool_tokens + 1) - prompt_tokens


def check_admin(caller: ApiKey) -> None:
    """Raises Forbidden."""
    if not caller.admin:
        raise Forbidden("this key may not: its entry needs admin: true")
