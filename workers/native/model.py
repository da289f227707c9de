"""The Llama family with each step in one call: what workers.models.llama computes, faster.

A row's result does not depend on the rows beside it, the chunk it comes in or the number of
threads, bit for bit; so neither do tokens, in float32 and in bfloat16.
"""

import ctypes

import torch

from workers.attention import AttentionPlan
from workers.kvcache import KVCache
from workers.layers import Linear, RMSNorm, RotaryEmbedding
from workers.models.config import ModelConfig
from workers.models.llama import Layer, Loader
from workers.native import library
from workers.native.attention import NativePlan
from workers.native.library import Kernels, PackedLinear
from workers.weights import Checkpoint

LEAST_ROTATIONS = 2048


class NativeLlama:
    def __init__(
        self, config: ModelConfig, weights: Checkpoint, dtype: torch.dtype, kernels: Kernels
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device("cpu")
        self._kernels = kernels
        self._kept: list[torch.Tensor | PackedLinear] = []  # what the structs point to
        loader = Loader(config, weights, dtype, self.device)
        embedding = loader.embedding()
        head = self._linear(loader.head(embedding))
        self._layers = (library.Layer * config.num_layers)(
            *(self._layer(loader.layer(i)) for i in range(config.num_layers))
        )
        self._model = library.Model(
            is_bf16=dtype == torch.bfloat16,
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            embedding=self._pointer(embedding),
            final_norm=self._norm(loader.norm("model.norm", config.hidden_size)),
            layers=ctypes.addressof(self._layers),
            head=head,
        )
        self._rope = RotaryEmbedding(config, self.device)
        self._rotations = torch.empty(0, config.head_dim)  # of positions from 0 on
        self._scratch = torch.empty(0, dtype=torch.uint8)

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
        assert isinstance(attention, NativePlan), f"{attention=} is another backend's"
        rotation = self._rotation(positions)
        batch = attention.batch.struct
        batch.tokens, batch.rotation = tokens.data_ptr(), rotation.data_ptr()
        batch.num_wanted = len(tokens) if rows is None else len(rows)
        batch.wanted = None if rows is None else rows.data_ptr()
        hidden = torch.empty(len(tokens), self.config.hidden_size, dtype=self.dtype)
        self._kernels.call(
            "forward",
            self._model,
            library.pool_of(cache),
            batch,
            hidden,
            self._scratch_for(len(tokens)),
            torch.get_num_threads(),
        )
        return hidden[: batch.num_wanted]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab_size] of the rows that sample."""
        hidden = hidden.contiguous()
        logits = torch.empty(len(hidden), self.config.vocab_size)
        self._kernels.call(
            "logits",
            self._model,
            hidden,
            len(hidden),
            torch.empty_like(hidden),
            logits,
            torch.get_num_threads(),
        )
        return logits

    def _rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """float32 [num_tokens, head_dim]: cosines of a row's angles, then sines."""
        longest = int(positions.max()) + 1
        if longest > len(self._rotations):
            known = torch.arange(max(longest, 2 * len(self._rotations), LEAST_ROTATIONS))
            rotation, half = self._rope.at(known, torch.float32), self.config.head_dim // 2
            parts = rotation.cos[:, 0, :half], rotation.sin[:, 0, half:]
            self._rotations = torch.cat(parts, dim=-1)
        return self._rotations.index_select(0, positions)

    def _scratch_for(self, num_tokens: int) -> torch.Tensor:
        size = self._kernels.call("scratch_bytes", self._model, num_tokens)
        if size > len(self._scratch):
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch

    def _layer(self, layer: Layer) -> library.Layer:
        return library.Layer(
            self._norm(layer.input_norm),
            self._norm(layer.q_norm),
            self._norm(layer.k_norm),
            self._norm(layer.mlp_norm),
            self._linear(layer.qkv),
            self._linear(layer.output),
            self._linear(layer.gate_up, gated=True),
            self._linear(layer.down),
        )

    def _linear(self, linear: Linear, gated: bool = False) -> library.Linear:
        packed = PackedLinear(self._kernels, linear.weight, linear.bias, gated)
        self._kept.append(packed)
        return packed.struct

    def _norm(self, norm: RMSNorm | None) -> int | None:
        return None if norm is None else self._pointer(norm.weight)

    def _pointer(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def is_supported(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether the kernels can compute this model."""
    per_head = config.num_heads // config.num_kv_heads
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim)
    return (
        dtype in library.DTYPES
        and all(size % 2 == 0 for size in sizes)
        and config.head_dim <= library.MAX_HEAD_DIM
        and per_head <= library.MAX_HEADS_PER_KV_HEAD
    )
