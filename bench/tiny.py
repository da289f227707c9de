"""T0: a random two-layer model of the Llama family, written as a Hugging Face folder.

Weights are scaled so that greedy outputs vary with the whole context and the two best logits are
far apart compared with float32 noise.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from workers import weights

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json"]


def tiny_model(
    folder: Path,
    arch: str = "llama",
    *,
    seed: int = 0,
    tokenizer: bool = False,
    num_shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write the model; ``overrides`` are fields of config.json. The demo model's tokenizer on
    request (which needs its package)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _tensors(config, arch, torch.Generator().manual_seed(seed))
    _save(folder, tensors, num_shards)
    if tokenizer:
        source = weights.resolve()
        for name in TOKENIZER_FILES:
            shutil.copy(source / name, folder / name)
    return folder


def _tensors(
    config: dict[str, Any], arch: str, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim

    def random(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    tensors = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden, std=1.0),
        "model.norm.weight": 1 + random(hidden, std=0.1),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(config["vocab_size"], hidden, std=0.5)
    bias = config.get("attention_bias", False)
    projections = {  # name: (out, in, gain, has bias)
        "self_attn.q_proj": (q_size, hidden, 1.5, bias or arch == "qwen2"),
        "self_attn.k_proj": (kv_size, hidden, 1.5, bias or arch == "qwen2"),
        "self_attn.v_proj": (kv_size, hidden, 2.0, bias or arch == "qwen2"),
        "self_attn.o_proj": (hidden, q_size, 2.0, bias),
        "mlp.gate_proj": (inner, hidden, 1.5, config.get("mlp_bias", False)),
        "mlp.up_proj": (inner, hidden, 1.5, config.get("mlp_bias", False)),
        "mlp.down_proj": (hidden, inner, 1.5, config.get("mlp_bias", False)),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if arch == "qwen3":
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        for name, (out, size, gain, has_bias) in projections.items():
            tensors[f"{prefix}.{name}.weight"] = random(out, size, std=gain * size**-0.5)
            if has_bias:
                tensors[f"{prefix}.{name}.bias"] = random(out, std=0.5)
        for name, size in norms.items():
            tensors[f"{prefix}.{name}.weight"] = 1 + random(size, std=0.1)
    return tensors


def _save(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        shard = {name: tensors[name] for name in sorted(tensors)[i::num_shards]}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
