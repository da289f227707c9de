"""The Llama family on the Triton kernels: what workers.models.llama computes, in fewer passes over
memory. A residual is added where the next norm reads it, and keys go to their pages where they are
rotated.
"""

import torch
import torch.nn.functional as F

from workers.attention import AttentionPlan
from workers.cuda import kernels
from workers.cuda.attention import CudaPlan
from workers.kvcache import KVCache
from workers.layers import RMSNorm
from workers.models.llama import Layer, Llama


class CudaLlama(Llama):
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
        assert isinstance(attention, CudaPlan), f"{attention=} is another backend's"
        angles = self._angles(positions)
        residual = F.embedding(tokens, self._embedding)
        x = torch.zeros_like(residual)
        for i, layer in enumerate(self._layers):
            x = _add_norm(x, residual, layer.input_norm)
            q = kernels.rotate_and_store(
                layer.qkv(x),
                _head_norms(layer),
                angles,
                attention.slots,
                cache.keys[i],
                cache.values[i],
            )
            x = layer.output(attention.forward(q, cache, i).flatten(1))
            x = _add_norm(x, residual, layer.mlp_norm)
            x = layer.down(kernels.silu_mul(layer.gate_up(x)))
        hidden = residual + x
        return hidden if rows is None else hidden[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab_size] of the rows that sample."""
        normed = kernels.norm(hidden, self._norm.weight, self._norm.eps)
        return self._head(normed).float()

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotation, half = self._rope.at(positions, torch.float32), self.config.head_dim // 2
        return rotation.cos[:, 0, :half], rotation.sin[:, 0, half:]


def _add_norm(x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    return kernels.add_norm(x, residual, norm.weight, norm.eps)


def _head_norms(layer: Layer) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
