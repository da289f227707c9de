"""Small real tokenizers of both families, trained in milliseconds, saved as a model's folder."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from serving.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Tokens flow evenly, one after another.",
    "Émile déjà vu; naïve café — “quotes” … and 1,234.56 €",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "안녕하세요 세계! 한국어 문장입니다.",
    "السلام عليكم لا إله",
    "日本語と中文：你好，世界。",
    "👨‍👩‍👧‍👦 family, 🇩🇪🇰🇷 flags, 👍🏽 skin, ❤️‍🔥 heart",
    "e\u0301 combining, \u202eRTL, \U0001f9d1\U0001f3fd\u200d\U0001f680 astronaut",
]


def byte_level(vocab_size: int = 600) -> tokenizers.Tokenizer:
    """GPT-2's kind, as SmolLM2, Llama 3 and Qwen use: any byte, no BOS."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:2] * 4 + TEXTS, trainer)
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """Llama 2's kind: words with a visible space, bytes for all that is not in the vocabulary."""
    specials = ["<unk>", "<s>", "</s>"]
    pieces = specials + [f"<0x{byte:02X}>" for byte in range(256)]
    words = {"\u2581" + word for text in TEXTS[:1] for word in text.split()}
    chars = {char for text in TEXTS[:1] for char in text.replace(" ", "\u2581")}
    vocab = {piece: i for i, piece in enumerate([*pieces, *sorted(chars | words)])}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(specials)
    return tokenizer


def save(fast: tokenizers.Tokenizer, folder: Path) -> Path:
    """As a Hugging Face folder, with a chat template and end tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": fast.get_vocab_size()}))
    return folder


def plain_tokenizer() -> Tokenizer:
    """The byte-level one, loaded without a folder."""
    fast = byte_level()
    return Tokenizer(fast, template=TEMPLATE, eos_ids=frozenset({0, 2}))
