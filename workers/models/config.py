"""What a Hugging Face folder says about its model, as one frozen value.

The front door reads it too, so nothing here needs torch, and nothing here opens a weight except to
take a fingerprint of it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtransfer.core.handle import KVLayout

FAMILIES = {  # architecture in config.json -> what it is called in messages
    "LlamaForCausalLM": "Llama 2/3, SmolLM",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
SAMPLE_BYTES, NUM_SAMPLES = 16 * 1024, 16  # of each weight file, for the fingerprint


class ModelError(Exception):
    """The model cannot be served. The message is one line that says why and what would work."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context. 0 means not given."""

    kind: str = "default"  # one of ROPE_TYPES
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 0.0  # yarn
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model of the Llama family: all that tells its members apart."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens of prompt + output; a sliding window caps it
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention output
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # of the weights on disk
    eos_ids: frozenset[int]
    fingerprint: str  # of config and weights; workers exchange pages only if it is equal

    @classmethod
    def load(cls, folder: Path) -> "ModelConfig":
        """Read a model folder. ModelError says in one line what is missing or unsupported."""
        config = read_json(folder / "config.json")
        if not config:
            raise ModelError(f"{folder} has no config.json: not a Hugging Face model folder")
        generation = read_json(folder / "generation_config.json")
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        try:
            return _parse(config, _eos_ids(eos), fingerprint(folder))
        except KeyError as error:
            raise ModelError(f"{folder / 'config.json'} has no field {error}") from None

    def kv_layout(self, page_size: int, dtype: str, tp_size: int = 1) -> KVLayout:
        return KVLayout(
            model=self.fingerprint,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads // tp_size,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            tp_size=tp_size,
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def fingerprint(folder: Path) -> str:
    """A hash of config.json and of the name, size and samples of every weight file.

    Samples tell apart two fine-tunes of one base, whose config and file sizes are equal.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for i in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * i // max(1, NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _parse(config: Mapping[str, Any], eos_ids: frozenset[int], weights: str) -> ModelConfig:
    architecture = _architecture(config)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act={config['hidden_act']!r} is not supported, only 'silu'")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ModelError(f"quantized weights ({method}) are not supported, except in GGUF files")
    num_heads = config["num_attention_heads"]
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    bias = bool(config.get("attention_bias", False))
    rope = _rope_fields(config)
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise ModelError(f"partial_rotary_factor={rotated} is not supported, only 1.0")
    max_model_len = config["max_position_embeddings"]
    return ModelConfig(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        max_model_len=min(max_model_len, _window(config) or max_model_len),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        rope_scaling=_rope_scaling(rope, max_model_len),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=is_qwen2 or bias,
        output_bias=bias and not is_qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        eos_ids=eos_ids,
        fingerprint=weights,
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [config.get("model_type", "none given")]
    for name in names:
        if name in FAMILIES:
            return str(name)
    supported = ", ".join(f"{name} ({models})" for name, models in FAMILIES.items())
    raise ModelError(f"architecture {names[0]!r} is not supported; supported: {supported}")


def _window(config: Mapping[str, Any]) -> int:
    """The sliding window that some layer applies; 0 when all layers see everything.

    Up to the window's length sliding and full attention are the same, so the window becomes the
    longest context.
    """
    window = config.get("sliding_window") or 0
    if config.get("layer_types"):
        return window if "sliding_attention" in config["layer_types"] else 0
    return window if config.get("use_sliding_window", True) else 0


def _rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes ``rope_parameters``, 4 wrote ``rope_theta`` and ``rope_scaling``."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_scaling(rope: Mapping[str, Any], max_model_len: int) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope_type={kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    original = rope.get("original_max_position_embeddings") or max_model_len
    return RopeScaling(
        kind=kind,
        factor=rope.get("factor") or max_model_len / original,
        original_max_len=original,
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 4.0),
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        attention_factor=rope.get("attention_factor") or 0.0,
        mscale=rope.get("mscale") or 0.0,
        mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
        truncate=rope.get("truncate", True),
    )


def _eos_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
