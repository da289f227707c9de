"""The Llama family: Llama, Mistral, Qwen2, Qwen3 and SmolLM are this model with switches.

Projections that read the same input are merged into one matrix when the weights are loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.attention import AttentionPlan
from workers.kvcache import KVCache
from workers.layers import Linear, RMSNorm, RotaryEmbedding, Rotation
from workers.models.config import ModelConfig
from workers.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: RMSNorm
    qkv: Linear  # rows: query heads, key heads, value heads
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear  # rows: gate, up
    down: Linear


class Llama:
    def __init__(
        self, config: ModelConfig, weights: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        loader = Loader(config, weights, dtype, device)
        self._embedding = loader.embedding()
        self._layers = [loader.layer(i) for i in range(config.num_layers)]
        self._norm = loader.norm("model.norm", config.hidden_size)
        self._head = loader.head(self._embedding)
        self._rope = RotaryEmbedding(config, device)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        attention: AttentionPlan,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [num_rows, hidden_size] of the rows asked for, in ascending order, or of
        all; keys and values of all go to the cache."""
        rotation = self._rope.at(positions, self.dtype)
        x = F.embedding(tokens, self._embedding)
        for i, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, layer.input_norm(x), rotation)
            attention.store(k, v, cache, i)
            x = x + layer.output(attention.forward(q, cache, i).flatten(1))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return x if rows is None else x[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab_size] of the rows that sample."""
        return self._head(self._norm(hidden)).float()

    def _qkv(
        self, layer: Layer, x: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(x).view(len(x), -1, config.head_dim)
        qk, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk[:, :num_heads], qk[:, num_heads:]
            return rotation.rotate(layer.q_norm(q)), rotation.rotate(layer.k_norm(k)), v
        rotated = rotation.rotate(qk)
        return rotated[:, :num_heads], rotated[:, num_heads:], v


class Loader:
    """Reads, checks, converts and merges the tensors of one checkpoint."""

    def __init__(
        self, config: ModelConfig, weights: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._weights = config, weights
        self._dtype, self._device = dtype, device
        weights.require(_names(config))

    def embedding(self) -> torch.Tensor:
        config = self._config
        return self._read("model.embed_tokens.weight", config.vocab_size, config.hidden_size)

    def head(self, embedding: torch.Tensor) -> Linear:
        config = self._config
        if config.tie_embeddings:
            return Linear(embedding)
        return Linear(self._read("lm_head.weight", config.vocab_size, config.hidden_size))

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._read(f"{name}.weight", size), self._config.rms_norm_eps)

    def layer(self, i: int) -> Layer:
        config, prefix = self._config, f"model.layers.{i}"
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)]
        gate_up = [("gate_proj", inner), ("up_proj", inner)]
        return Layer(
            input_norm=self.norm(f"{prefix}.input_layernorm", hidden),
            qkv=self._linear(attention, qkv, hidden, config.qkv_bias),
            q_norm=self.norm(f"{attention}.q_norm", head_dim) if config.qk_norm else None,
            k_norm=self.norm(f"{attention}.k_norm", head_dim) if config.qk_norm else None,
            output=self._linear(attention, [("o_proj", hidden)], q_size, config.output_bias),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm", hidden),
            gate_up=self._linear(mlp, gate_up, hidden, config.mlp_bias),
            down=self._linear(mlp, [("down_proj", hidden)], inner, config.mlp_bias),
        )

    def _linear(self, prefix: str, parts: list[tuple[str, int]], size: int, bias: bool) -> Linear:
        """One linear layer of several, their outputs side by side."""
        rows = [self._read(f"{prefix}.{name}.weight", out, size) for name, out in parts]
        biases = [self._read(f"{prefix}.{name}.bias", out) for name, out in parts if bias]
        return Linear(torch.cat(rows), torch.cat(biases) if biases else None)

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        return self._weights.read(name, shape).to(self._device, self._dtype)


def _names(config: ModelConfig) -> Iterator[str]:
    """Every tensor that the model needs."""
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    if not config.tie_embeddings:
        yield "lm_head.weight"
    qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if config.qk_norm else []
    biased = qkv if config.qkv_bias else []
    biased = biased + (["self_attn.o_proj"] if config.output_bias else [])
    biased = biased + (mlp if config.mlp_bias else [])
    for i in range(config.num_layers):
        for name in [*norms, *qkv, "self_attn.o_proj", *mlp]:
            yield f"model.layers.{i}.{name}.weight"
        for name in biased:
            yield f"model.layers.{i}.{name}.bias"
