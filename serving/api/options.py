"""All of a request but its prompt: sampling, stops, placement. Ranges are stated here, once."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.api.fields import Fields, as_text, is_number, wrong
from serving.api.settings import FrontSettings
from serving.generation import AUTO, MODES
from serving.tokenizer import Tokenizer
from workers.core.request import SLO, Sampling

MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_STOP_IDS = 256
MAX_BAD_WORDS = 128
MAX_TOKENS = 2**31 - 1
MAX_BIAS = 100.0
MAX_SALT_CHARS = 256
INT32 = (-(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Options:
    """Checked, and named as in ``Generation``."""

    n: int
    sampling: Sampling
    stop: tuple[str, ...]
    include_stop: bool
    stop_token_ids: frozenset[int]
    mode: str
    pinned: tuple[str, ...]
    slo: SLO
    priority: int
    cache_salt: str
    traceparent: str


def read_options(
    fields: Fields,
    headers: Mapping[str, str],
    settings: FrontSettings,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: str = "",
) -> Options:
    """Raises BadRequest with the name of the first field that is wrong."""
    placement = fields.section("evenflow")
    stop_ids = _stop_ids(fields, tokenizer.vocab_size)
    eos_ids = frozenset() if fields.flag("ignore_eos") else tokenizer.eos_ids
    seed = fields.optional_integer("seed", -(2**63), 2**64 - 1)
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=fields.integer("min_tokens", 0, 0, max_tokens),
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=_above_zero(fields, "top_p", 1.0),
        top_k=max(0, fields.integer("top_k", 0, -1, INT32[1])),  # -1 is vLLM's "all"
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=secrets.randbits(63) if seed is None else seed % 2**64,
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=_above_zero(fields, "repetition_penalty", 100.0),
        logit_bias=_logit_bias(fields.raw("logit_bias"), tokenizer.vocab_size),
        stop_ids=stop_ids | eos_ids,
        allowed_ids=_allowed_ids(fields, tokenizer.vocab_size),
        bad_words=_bad_words(fields, tokenizer),
        grammar=grammar,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return Options(
        n=fields.integer("n", 1, 1, settings.max_n),
        sampling=sampling,
        stop=_stops(fields.raw("stop")),
        include_stop=fields.flag("include_stop_str_in_output"),
        stop_token_ids=stop_ids,
        mode=_mode(placement, headers.get("x-evenflow-mode", "")),
        pinned=_pinned(placement.raw("worker"), headers.get("x-evenflow-worker", ""), settings),
        slo=_slo(placement.section("slo"), headers, settings.slo),
        priority=placement.integer("priority", fields.integer("priority", 0, *INT32), *INT32),
        cache_salt=_cache_salt(fields),
        traceparent=headers.get("traceparent", ""),
    )


def token_ids(ids: Any, vocab_size: int, param: str) -> tuple[int, ...]:
    """A list of ids, each within the vocabulary."""
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise wrong(param, "must be a list of token ids")
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(param, "must hold integers only where it holds token ids")
        if not 0 <= value < vocab_size:
            shown = value if abs(value) < 2**63 else "a number"
            raise wrong(param, f"holds {shown}, outside the vocabulary of {vocab_size} tokens")
    return tuple(ids)


def _cache_salt(fields: Fields) -> str:
    salt = fields.text("cache_salt")
    if len(salt) > MAX_SALT_CHARS:
        raise fields.wrong("cache_salt", f"may have at most {MAX_SALT_CHARS} characters")
    return salt


def _stop_ids(fields: Fields, vocab_size: int) -> frozenset[int]:
    ids = token_ids(fields.raw("stop_token_ids") or (), vocab_size, "stop_token_ids")
    if len(ids) > MAX_STOP_IDS:
        raise fields.wrong("stop_token_ids", f"may hold at most {MAX_STOP_IDS} ids")
    return frozenset(ids)


def _allowed_ids(fields: Fields, vocab_size: int) -> frozenset[int]:
    given = fields.raw("allowed_token_ids")
    ids = token_ids(() if given is None else given, vocab_size, "allowed_token_ids")
    if given is not None and not ids:
        raise fields.wrong("allowed_token_ids", "allows nothing")
    return frozenset(ids)


def _bad_words(fields: Fields, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each as it is written at the start of a text and, as vLLM has it, after a space."""
    words = fields.raw("bad_words") or ()
    if isinstance(words, str) or not isinstance(words, Sequence) or len(words) > MAX_BAD_WORDS:
        raise fields.wrong("bad_words", f"must be a list of at most {MAX_BAD_WORDS} strings")
    found = []
    for word in words:
        if not 0 < len(as_text(word, "bad_words")) <= MAX_STOP_CHARS:
            raise fields.wrong("bad_words", f"must have 1 to {MAX_STOP_CHARS} characters each")
        for text in (word, " " + word.lstrip()):
            found.append(tuple(tokenizer.encode(text, add_special_tokens=False)))
    return tuple(dict.fromkeys(ids for ids in found if ids))


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


def _above_zero(fields: Fields, name: str, high: float) -> float:
    value = fields.number(name, 1.0, 0.0, high)
    if value == 0.0:
        raise fields.wrong(name, "must be above 0")
    return value


def _logit_bias(value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise wrong("logit_bias", "must map token ids to numbers")
    biases = {}
    for key, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise wrong("logit_bias", "has a key that is not a token id")
        if int(key) >= vocab_size:
            raise wrong("logit_bias", f"has {key}, outside the vocabulary of {vocab_size} tokens")
        if not is_number(bias) or abs(bias) > MAX_BIAS:
            raise wrong("logit_bias", f"has a value that is not within {MAX_BIAS:g} of 0")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def _mode(placement: Fields, header: str) -> str:
    mode = placement.text("mode") or header or AUTO
    if mode not in MODES:
        raise placement.wrong("mode", f"must be one of {', '.join(MODES)}")
    return mode


def _slo(slo: Fields, headers: Mapping[str, str], default: SLO) -> SLO:
    """Milliseconds in the body, else in headers, else what the operator promised."""
    ttft_ms = _objective(slo, "ttft_ms", headers.get("x-slo-ttft-ms"))
    itl_ms = _objective(slo, "itl_ms", headers.get("x-slo-itl-ms"))
    return SLO(
        default.ttft_s if ttft_ms is None else ttft_ms / 1e3,
        default.itl_s if itl_ms is None else itl_ms / 1e3,
    )


def _objective(slo: Fields, name: str, header: str | None) -> float | None:
    value = slo.optional_number(name, 0.0, 1e9)
    if value is None and header:
        where = f"x-slo-{name.replace('_', '-')}"
        try:
            number = float(header)
        except ValueError:
            raise wrong(where, "must be a number") from None
        value = Fields({where: number}).optional_number(where, 0.0, 1e9)
    if value == 0.0:
        raise slo.wrong(name, "must be above 0")
    return value


def _pinned(workers: Any, header: str, settings: FrontSettings) -> tuple[str, ...]:
    param = "evenflow.worker"
    if workers is None:
        workers = [name.strip() for name in header.split(",") if name.strip()]
    if isinstance(workers, str):
        workers = [workers]
    if not isinstance(workers, Sequence):
        raise wrong(param, "must be a worker id, or two: prefill and decode")
    names = tuple(as_text(worker, param) for worker in workers)
    if names and not settings.debug:
        raise wrong(param, "is for tests: this server was not started with debug on")
    if len(names) > 2:
        raise wrong(param, "names more than two workers")
    return names
