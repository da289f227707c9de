"""A GGUF file, converted once into a Hugging Face folder in the cache.

Everything after this file sees safetensors and JSON only. Weights are dequantized to float32, which
loses nothing that the file still has.
"""

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xxhash
from safetensors.numpy import save_file

from workers.gguf_tokenizer import tokenizer_config, tokenizer_json
from workers.models.config import FAMILIES, ModelError

FORMAT = 1  # of the converted folder: a new number converts again
SHARD_BYTES = 4 << 30
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LAYER_NAMES = {  # GGUF -> Hugging Face, inside a layer
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
FREQUENCIES = "rope_freqs.weight"  # llama3 scaling, as divisors of the frequencies


def convert(path: Path) -> Path:
    """The folder for a GGUF file; converts it if no process has done so before.

    The folder appears at once and whole, whatever happens to this process, and two processes that
    ask at once convert once: the second waits.
    """
    folder = cache_dir() / "gguf" / _key(path)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            shutil.rmtree(partial, ignore_errors=True)  # of a process that died
            partial.mkdir()
            _write_folder(path, partial)
            partial.rename(folder)
    return folder


def cache_dir() -> Path:
    if chosen := os.environ.get("EVENFLOW_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "evenflow"


def _key(path: Path) -> str:
    """Name, size and a hash of both ends: the metadata, and the last tensors."""
    size = path.stat().st_size
    digest = xxhash.xxh3_64(f"{FORMAT}:{size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(4 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return f"{path.stem}-{digest.hexdigest()}"


def _write_folder(path: Path, folder: Path) -> None:
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"cannot read {path} as GGUF: {error}") from None
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(metadata, tensors)
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": tokenizer_config(metadata, config["max_position_embeddings"]),
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    _write_weights(tensors, config, folder)


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    kind = metadata["general.architecture"]
    if kind not in ARCHITECTURES:
        supported = ", ".join(f"{name} ({FAMILIES[hf]})" for name, hf in ARCHITECTURES.items())
        raise ModelError(f"GGUF architecture {kind!r} is not supported; supported: {supported}")

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{kind}.{name}", default)
        if value is None:
            raise ModelError(f"the GGUF file has no field {kind}.{name}")
        return value

    hidden_size, num_heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden_size // num_heads)
    theta = field("rope.freq_base", 10000.0)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": field("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": _short(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, kind, tensors, theta, head_dim),
        "sliding_window": metadata.get(f"{kind}.attention.sliding_window"),
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _short(value: float) -> float:
    """1e-5 was stored as the float32 next to it; write what was meant."""
    return float(f"{value:.6g}")


def _rope_scaling(
    metadata: Mapping[str, Any],
    kind: str,
    tensors: Mapping[str, Any],
    theta: float,
    head_dim: int,
) -> dict[str, Any] | None:
    if FREQUENCIES in tensors:
        return _llama3_scaling(_dequantize(tensors[FREQUENCIES]), theta, head_dim)
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "none":
        return None
    fields = {"rope_type": scaling, "factor": metadata.get(f"{kind}.rope.scaling.factor", 1.0)}
    original = metadata.get(f"{kind}.rope.scaling.original_context_length")
    return {**fields, "original_max_position_embeddings": original} if original else fields


def _llama3_scaling(divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """GGUF keeps only the divisors; find again the parameters they were computed from."""
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    wavelen = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelen - low) / (high - low), 0.0, 1.0)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ModelError("the GGUF file's rope_freqs are not those of Llama 3.1 to 3.3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _write_weights(tensors: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> None:
    names = {name: _hf_name(name) for name in tensors if name != FREQUENCIES}
    shards = list(_shards({name: int(tensors[name].n_elements) * 4 for name in names}))
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        arrays = {names[name]: _array(tensors[name], config) for name in shard}
        save_file(arrays, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(arrays, file))
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    shard: list[str] = []
    total = 0
    for name, size in sizes.items():
        if shard and total + size > SHARD_BYTES:
            yield shard
            shard, total = [], 0
        shard.append(name)
        total += size
    yield shard


def _hf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in LAYER_NAMES:
        raise ModelError(f"the GGUF file has a tensor {name!r} that is not of the Llama family")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{suffix}"


def _array(tensor: Any, config: Mapping[str, Any]) -> np.ndarray:
    array = _dequantize(tensor)
    if config["model_type"] in ("llama", "mistral"):  # llama.cpp interleaves the rotary halves
        if ".attn_q." in tensor.name:
            array = _unpermuted(array, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            array = _unpermuted(array, config["num_key_value_heads"])
    return np.ascontiguousarray(array, dtype=np.float32)


def _unpermuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _dequantize(tensor: Any) -> np.ndarray:
    try:
        return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type))
    except NotImplementedError as error:
        raise ModelError(f"{tensor.name}: {error}") from None
