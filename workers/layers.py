"""The parts that models are made of, in the numerics of transformers."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.models.config import ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of one step's positions, in the form that ``rotate`` takes."""

    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # the same; its first half negated

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, heads, head_dim]."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((second, first), dim=-1) * self.sin


class RotaryEmbedding:
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies, self._scale = _scaled(
            _frequencies(config.rope_theta, config.head_dim),
            config.rope_scaling,
            config.rope_theta,
        )
        self._frequencies = frequencies.to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return Rotation(
            torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1),
        )


def _frequencies(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim))


def _scaled(
    frequencies: torch.Tensor, scaling: RopeScaling, theta: float
) -> tuple[torch.Tensor, float]:
    """Frequencies and the factor on cos and sin, for every kind in ROPE_TYPES."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, theta), _yarn_attention_factor(scaling)
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between interpolated."""
    turns = scaling.original_max_len / (2 * math.pi / frequencies)  # over the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = torch.where(turns < low, frequencies / scaling.factor, between)
    return torch.where(turns > high, frequencies, stretched)


def _yarn(frequencies: torch.Tensor, scaling: RopeScaling, theta: float) -> torch.Tensor:
    half = len(frequencies)

    def dimension(num_turns: float) -> float:
        turns = scaling.original_max_len / (num_turns * 2 * math.pi)
        return half * math.log(turns) / math.log(theta)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(half).float() - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)
