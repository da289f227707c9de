"""Writes T0 as a GGUF file, the way llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

BYTE_TOKENS = 256  # a byte-level vocabulary begins with one token per byte
HF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, folder: Path, arch: str = "llama", tokenizer: str = "gpt2") -> Path:
    """The GGUF form of a folder from tiny_model, with a small tokenizer of the given kind."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, tokenizer, config["vocab_size"])
    if scaling := config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config, scaling))
    for name, array in load_file(folder / "model.safetensors").items():
        writer.add_tensor(*_renamed(name, array, arch, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _add_tokenizer(writer: Any, kind: str, vocab_size: int) -> None:
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        tokens = [*byte_alphabet(), "he", "ll", "hell", "Ġw"]
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(["h e", "l l", "he ll", "Ġ w"])
    else:
        tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokens += ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
        writer.add_token_scores([-float(i) for i in range(vocab_size)])
        writer.add_unk_token_id(0)
    tokens += [f"<extra {i}>" for i in range(vocab_size - len(tokens) - 2)]
    tokens += ["<begin>", "<end>"]
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    writer.add_token_list(tokens)
    writer.add_token_types([normal] * (vocab_size - 2) + [control] * 2)
    writer.add_bos_token_id(vocab_size - 2)
    writer.add_eos_token_id(vocab_size - 1)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def _renamed(
    name: str, array: np.ndarray, arch: str, config: dict[str, Any]
) -> tuple[str, np.ndarray]:
    stem, _, suffix = name.rpartition(".")
    others = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in others:
        return f"{others[stem]}.{suffix}", array
    _, _, layer, part = stem.split(".", 3)
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    if arch == "llama" and part in heads:  # llama.cpp's permutation, undone by the conversion
        halves = array.reshape(heads[part], 2, -1, *array.shape[1:])
        array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    return f"blk.{layer}.{HF_NAMES[part]}.{suffix}", array


def _llama3_divisors(config: dict[str, Any], scaling: dict[str, Any]) -> np.ndarray:
    """As llama.cpp's converter computes rope_freqs."""
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    divisors = []
    for i in range(0, config["head_dim"], 2):
        wavelen = 2 * np.pi * config["rope_theta"] ** (i / config["head_dim"])
        if wavelen < high:
            divisors.append(1.0)
        elif wavelen > low:
            divisors.append(scaling["factor"])
        else:
            turns = scaling["original_max_position_embeddings"] / wavelen
            smooth = (turns - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)
