"""The drafter: a few Qwen3-style layers whose every block row attends to the target's hidden states.

    features [T, F] --fc, hidden_norm--> context H [T, H], once; each layer makes its own K and V of it
    block rows [R, H] = (clean token, mask, mask, ...) per block --layers--> norm --> the target's LM head

Parameter names are z-lab's checkpoint layout, so `state_dict()` is an export. Weights are kept in
float32 and cast to the activations' type where they are used: bf16 weights turn into NaN after some
240 steps. Initial weights depend on (seed, parameter name) alone, not on device or threads.

Shapes: T context tokens, R block rows, H hidden, F taps*H, N heads, G key-value heads, E head dim.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.dflash.compiled import fused
from services.dflash.drafter_config import DrafterConfig
from services.dflash.linear import Linear, project, project_gated
from services.seeds import seed as derive_seed

INITIAL_DEVIATION = 0.02


class Rope(NamedTuple):
    """Cosines and sines of rotary positions, each [rows, E]."""

    cos: Tensor
    sin: Tensor


class KeyValue(NamedTuple):
    """Keys (normed and rotated) and values, each [rows, G, E]."""

    key: Tensor
    value: Tensor


class Attend(Protocol):
    """How block rows see context and block: the structure of the mask, chosen by the caller."""

    def __call__(self, layer: int, query_RNE: Tensor, context: KeyValue, block: KeyValue) -> Tensor:
        """Returns [R, N, E]."""


class RMSNorm(nn.Module):
    """Statistics in float32, scale in the input's type: the rounding that servers of Qwen3 layers use."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, self.eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * wide.to(x.dtype)


normed = fused(_normed)


@fused
def normed_sum(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, and its norm."""
    total = x + more
    return total, _normed(total, weight, eps)


@fused
def normed_and_rotated(x: Tensor, weight: Tensor, eps: float, rope: Rope) -> Tensor:
    """Each head of [rows, heads, E] normed, then rotated; halves paired as in Llama."""
    x = _normed(x, weight, eps)
    first, second = x.chunk(2, dim=-1)
    return x * rope.cos[:, None] + torch.cat((-second, first), dim=-1) * rope.sin[:, None]


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, key = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = Linear(config.hidden_size, query)
        self.k_proj = Linear(config.hidden_size, key)
        self.v_proj = Linear(config.hidden_size, key)
        self.o_proj = Linear(query, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def block(self, x: Tensor, rope: Rope) -> tuple[Tensor, KeyValue]:
        """Queries [rows, N, E], keys and values of block rows."""
        key, value, query = self._heads(x, self.k_proj, self.v_proj, self.q_proj)
        key = normed_and_rotated(key, self.k_norm.weight, self.k_norm.eps, rope)
        return normed_and_rotated(query, self.q_norm.weight, self.q_norm.eps, rope), KeyValue(key, value)

    def key_value(self, x: Tensor, rope: Rope) -> KeyValue:
        key, value = self._heads(x, self.k_proj, self.v_proj)
        return KeyValue(normed_and_rotated(key, self.k_norm.weight, self.k_norm.eps, rope), value)

    def _heads(self, x: Tensor, *maps: Linear) -> list[Tensor]:
        return [rows.unflatten(-1, (-1, self.head_dim)) for rows in project(x, *maps)]


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        return project_gated(gate, up, self.down_proj)


class DrafterLayer(nn.Module):
    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_RH: Tensor, rope: Rope, context: KeyValue, attend: Attend) -> Tensor:
        query_RNE, block = self.self_attn.block(self.input_layernorm(x_RH), rope)
        mixed_RH = self.self_attn.o_proj(attend(self.index, query_RNE, context, block).flatten(1))
        norm = self.post_attention_layernorm
        x_RH, h_RH = normed_sum(x_RH, mixed_RH, norm.weight, norm.eps)
        return x_RH + self.mlp(h_RH)


class Drafter(nn.Module):
    """Float32 on the CPU after construction, a pure function of (`config`, `seed`).

    `seed` None leaves the weights undefined, to be loaded: drawing a billion takes 8 s.
    """

    def __init__(self, config: DrafterConfig, *, seed: int | None) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(config.feature_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if seed is not None:
            self._draw_weights(seed)

    @property
    def _layers(self) -> list[DrafterLayer]:
        return cast(list[DrafterLayer], list(self.layers))

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Tables for absolute positions [rows]; angles in float32 whatever the compute type."""
        size = self.config.head_dim
        exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.int64).float() / size
        angles = positions.float()[:, None] * (1.0 / (self.config.rope_theta**exponents))
        angles = torch.cat((angles, angles), dim=-1)
        return Rope(angles.cos().to(dtype), angles.sin().to(dtype))

    def block_inputs(
        self, embed_weight_VH: Tensor, clean_ids_A: Tensor, size: int, dtype: torch.dtype
    ) -> Tensor:
        """Input rows of blocks, [A * size, H]: the clean token's embedding, then masks, all scaled."""
        clean_AH = F.embedding(clean_ids_A, embed_weight_VH)
        masks = embed_weight_VH[self.config.mask_token_id].expand(clean_AH.shape[0], size - 1, -1)
        rows = torch.cat((clean_AH[:, None], masks), dim=1).flatten(0, 1).to(dtype)
        return rows * self.config.input_embedding_scale

    def context(self, features_TF: Tensor) -> Tensor:
        """H [T, H], the same for every layer."""
        return self.hidden_norm(self.fc(features_TF))

    def context_key_values(self, context_TH: Tensor, positions_T: Tensor) -> list[KeyValue]:
        """Each layer's keys and values of the context; what a server caches instead of H."""
        rope = self.rope(positions_T, context_TH.dtype)
        return [layer.self_attn.key_value(context_TH, rope) for layer in self._layers]

    def forward(
        self, inputs_RH: Tensor, positions_R: Tensor, context: list[KeyValue], attend: Attend
    ) -> Tensor:
        """Block rows after the final norm, [R, H]: what the target's LM head takes.

        `inputs_RH` are embedding rows of the target, already scaled; `context` one entry a layer.
        """
        rope = self.rope(positions_R, inputs_RH.dtype)
        x_RH = inputs_RH
        for layer, key_value in zip(self._layers, context, strict=True):
            x_RH = layer(x_RH, rope, key_value, attend)
        return self.norm(x_RH)

    @torch.no_grad()
    def _draw_weights(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                generator = torch.Generator().manual_seed(derive_seed(seed, "initial weights", name))
                parameter.normal_(0.0, INITIAL_DEVIATION, generator=generator)
