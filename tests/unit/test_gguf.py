"""A GGUF file becomes the Hugging Face folder that it was made from."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from bench.tiny import tiny_model
from tests.tiny_gguf import write_gguf
from workers import gguf
from workers.models.config import ModelConfig, ModelError
from workers.weights import resolve

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.mark.parametrize(("arch", "overrides"), CASES)
def test_weights_and_config_come_back(arch: str, overrides: Any, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "hf", arch, vocab_size=320, **overrides)
    converted = resolve(str(write_gguf(tmp_path / "m.gguf", folder, arch)))
    ours, theirs = (load_file(f / "model.safetensors") for f in (converted, folder))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    after, before = ModelConfig.load(converted), ModelConfig.load(folder)
    differing = {
        name
        for name in ModelConfig.__dataclass_fields__
        if getattr(after, name) != getattr(before, name)
    }
    assert differing == {"fingerprint", "eos_ids"}
    assert after.eos_ids == {319}


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "hf", vocab_size=320)
    converted = resolve(str(write_gguf(tmp_path / "m.gguf", folder)))
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    encoded = tokenizer.encode("hello wé 12<end>")
    assert encoded.tokens == ["hell", "o", "Ġw", "Ã", "©", "Ġ", "1", "2", "<end>"]
    assert tokenizer.decode(encoded.ids) == "hello wé 12"
    config = json.loads((converted / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<end>" and config["bos_token"] == "<begin>"
    assert config["chat_template"] == "{{ messages[0]['content'] }}"


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """Begins with BOS, merges by score, spells unknown characters in bytes."""
    folder = tiny_model(tmp_path / "hf", vocab_size=320)
    converted = resolve(str(write_gguf(tmp_path / "m.gguf", folder, tokenizer="llama")))
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    encoded = tokenizer.encode("hello é")
    assert encoded.tokens == ["<begin>", "▁hello", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == "hello é"


def test_a_second_conversion_is_not_made(tmp_path: Path, cache: Path) -> None:
    folder = tiny_model(tmp_path / "hf", vocab_size=320)
    path = write_gguf(tmp_path / "m.gguf", folder)
    converted = gguf.convert(path)
    mark = converted / "mark"
    mark.touch()
    assert gguf.convert(path) == converted and mark.exists()
    other = tiny_model(tmp_path / "other", vocab_size=320, seed=1)
    assert gguf.convert(write_gguf(path, other)) != converted  # same name and size


def test_two_processes_at_once(tmp_path: Path, cache: Path) -> None:
    folder = tiny_model(tmp_path / "hf", vocab_size=320)
    path = write_gguf(tmp_path / "m.gguf", folder)
    (cache / "m-left.partial").mkdir(parents=True)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.map(gguf.convert, [path] * 4)
    assert len(set(found)) == 1
    ModelConfig.load(found[0])
    assert not list(cache.glob(f"{found[0].name}.partial"))


def test_an_interrupted_conversion_is_made_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "hf", vocab_size=320))
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            gguf.convert(path)
    assert not [p for p in cache.iterdir() if p.is_dir() and p.suffix != ".partial"]
    ModelConfig.load(gguf.convert(path))


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tmp_path / "hf", vocab_size=320)
    monkeypatch.setattr(gguf, "SHARD_BYTES", 100_000)
    converted = gguf.convert(write_gguf(tmp_path / "m.gguf", folder))
    index = json.loads((converted / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert resolve(str(converted)) == converted


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not GGUF at all, but long enough to be read")
    with pytest.raises(ModelError, match=r"cannot read .*bad\.gguf as GGUF"):
        resolve(str(tmp_path / "bad.gguf"))
    folder = tiny_model(tmp_path / "hf", vocab_size=320)
    strange = write_gguf(tmp_path / "m.gguf", folder, arch="gemma3")
    with pytest.raises(ModelError, match="'gemma3' is not supported; supported: llama"):
        resolve(str(strange))
