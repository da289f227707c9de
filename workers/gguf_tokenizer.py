"""The tokenizer inside a GGUF file, written as Hugging Face's tokenizer.json.

Only the JSON form is known here; the tokenizers library is not needed to write it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from workers.models.config import ModelError

Json = dict[str, Any]

CONTROL, USER_DEFINED = 3, 4  # token types in GGUF
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = CONTRACTIONS + r"|\p{N}{1,3}" + REST
QWEN2_SPLIT = CONTRACTIONS + r"|\p{N}" + REST


def tokenizer_json(metadata: Mapping[str, Any]) -> Json:
    """tokenizer.json for the ``tokenizer.ggml.*`` fields of a GGUF file."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kind = metadata.get("tokenizer.ggml.model")
    vocab = {token: i for i, token in enumerate(tokens)}
    if kind == "gpt2":
        pairs = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
        parts = _byte_level(metadata.get("tokenizer.ggml.pre", "default"))
        fallback = False
    elif kind == "llama":
        pairs = _merges(tokens, metadata["tokenizer.ggml.scores"])
        parts = _sentencepiece(bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))
        fallback = True
    else:
        raise ModelError(f"GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id") if fallback else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, metadata.get("tokenizer.ggml.token_type", [])),
        **parts,
        "post_processor": _post_processor(metadata, tokens, parts["post_processor"]),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": fallback,
            "byte_fallback": fallback,
            "ignore_merges": metadata.get("tokenizer.ggml.pre") == "llama-bpe",
            "vocab": vocab,
            "merges": pairs,
        },
    }


def tokenizer_config(metadata: Mapping[str, Any], max_len: int) -> Json:
    """tokenizer_config.json: the special tokens by role, and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(metadata),
    }
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for role, name in roles.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Files without the flag: SentencePiece vocabularies begin with BOS, byte-level ones do not."""
    default = metadata.get("tokenizer.ggml.model") == "llama"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def _byte_level(pre: str) -> Json:
    """Normalizer, pre-tokenizer, post-processor and decoder of a byte-level BPE."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    whole = [{**byte_level, "use_regex": True}]
    steps = {
        "smollm": [digits, *whole],
        "default": whole,
        "gpt-2": whole,
        "llama-bpe": [_split(LLAMA3_SPLIT), {**byte_level, "use_regex": False}],
        "qwen2": [_split(QWEN2_SPLIT), {**byte_level, "use_regex": False}],
    }
    if pre not in steps:
        raise ModelError(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {[*steps]}")
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps[pre]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
    }


def _split(pattern: str) -> Json:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _sentencepiece(prefix_space: bool) -> Json:
    """The same four of a SentencePiece BPE with byte fallback, as Llama 2 has it."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = [{"type": "Prepend", "prepend": "▁"}] if prefix_space else []
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix_space else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [*decoders, *strip]},
    }


def _post_processor(metadata: Mapping[str, Any], tokens: Sequence[str], other: Any) -> Any:
    if not adds_bos(metadata):
        return other
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    bos = tokens[bos_id]
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, begin, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[Json]:
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (CONTROL, USER_DEFINED)
    ]


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    """The merges that SentencePiece's scores imply: better scores merge first."""
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]
