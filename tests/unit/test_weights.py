"""Models are found by whatever names them; what cannot be served says why in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.tiny import tiny_model
from workers.kvcache import DTYPES
from workers.models.config import ModelConfig, ModelError
from workers.models.llama import Llama
from workers.runner import load_runner
from workers.weights import Checkpoint, resolve


def load(folder: Path) -> Llama:
    config = ModelConfig.load(folder)
    return Llama(config, Checkpoint(folder), torch.float32, torch.device("cpu"))


def refuse(folder: Path | str) -> str:
    """The message with which the model is refused, at whichever step notices."""
    with pytest.raises(ModelError) as refusal:
        load(resolve(str(folder)))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def edit(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny", vocab_size=256)


def test_sharded_and_single_files_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    sharded = tiny_model(tmp_path / "sharded", vocab_size=256, num_shards=3)
    assert len(list(sharded.glob("*.safetensors"))) == 3
    tokens = torch.arange(10)
    embedded = [load(f)._embedding[tokens] for f in (folder, resolve(str(sharded)))]
    assert torch.equal(*embedded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_converted(folder: Path, dtype: str) -> None:
    runner = load_runner(folder, dtype, num_pages=2)
    assert runner.cache.pool.dtype == DTYPES[dtype]
    assert runner.cache.layout.dtype == dtype


def test_no_such_model(tmp_path: Path) -> None:
    assert "no such model folder, and not a Hugging Face id" in refuse(tmp_path / "nowhere")
    assert "no such file" in refuse(tmp_path / "nowhere.gguf")
    (tmp_path / "notes.txt").touch()
    assert "neither a model folder nor a .gguf file" in refuse(tmp_path / "notes.txt")


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "'nobody/nothing' is not a local folder" in refuse("nobody/nothing")


def test_incomplete_folders(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refuse(tmp_path / "empty")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    assert "has no *.safetensors weights" in refuse(folder)
    missing = {f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)}
    save_file({name: t for name, t in tensors.items() if name not in missing}, weights)
    assert "the weights lack model.layers.0.mlp.up_proj.weight, model.layers.1" in refuse(folder)
    weights.write_bytes(b"\x00" * 50)
    assert "cannot read weights from" in refuse(folder)


def test_a_missing_shard(tmp_path: Path) -> None:
    sharded = tiny_model(tmp_path / "sharded", vocab_size=256, num_shards=3)
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert "lacks the weight file model-00002-of-00003.safetensors" in refuse(sharded)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM' is not supported; supported"),
        ({"hidden_size": 32}, "model.embed_tokens.weight has shape (256, 64), but config.json"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights (gptq)"),
    ],
)
def test_what_is_not_supported(folder: Path, fields: dict[str, Any], message: str) -> None:
    assert message in refuse(edit(folder, **fields))


def test_a_config_without_a_field(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "has no field 'hidden_size'" in refuse(folder)
    (folder / "config.json").write_text("{")
    assert "cannot read" in refuse(folder)


def test_fingerprints_tell_models_apart(folder: Path, tmp_path: Path) -> None:
    same = tiny_model(tmp_path / "same", vocab_size=256)
    other_weights = tiny_model(tmp_path / "other", vocab_size=256, seed=1)
    other_config = edit(tiny_model(tmp_path / "config", vocab_size=256), rope_theta=20000.0)
    prints = [ModelConfig.load(f).fingerprint for f in (folder, same, other_weights, other_config)]
    assert prints[0] == prints[1] and len(set(prints)) == 3


@pytest.mark.parametrize(
    ("fields", "max_model_len"),
    [
        ({}, 8192),
        ({"sliding_window": 1000}, 1000),
        ({"sliding_window": 1000, "use_sliding_window": False}, 8192),
        ({"sliding_window": 1000, "layer_types": ["full_attention"] * 2}, 8192),
        ({"sliding_window": 1000, "layer_types": ["full_attention", "sliding_attention"]}, 1000),
        ({"max_position_embeddings": 512, "sliding_window": 1000}, 512),
    ],
)
def test_a_sliding_window_caps_the_context(
    folder: Path, fields: dict[str, Any], max_model_len: int
) -> None:
    assert ModelConfig.load(edit(folder, **fields)).max_model_len == max_model_len


def test_end_tokens_come_from_the_generation_config(folder: Path) -> None:
    assert ModelConfig.load(folder).eos_ids == {2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert ModelConfig.load(folder).eos_ids == {5, 7}


def test_layout(folder: Path) -> None:
    config = ModelConfig.load(folder)
    layout = config.kv_layout(16, "float32")
    assert layout.page_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert layout.model == config.fingerprint
