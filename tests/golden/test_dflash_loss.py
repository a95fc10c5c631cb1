"""Loss and gradients of a small pack against a dense float64 model written from the paper, not from our code.

`reference_sums` loops over blocks, builds each one's keys by hand, takes full logits, and lets
autograd do the rest. Its figures are also kept in `dflash_loss.json`, so that both cannot drift together.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from services.dflash.anchors import draw_anchors
from services.dflash.drafter import Drafter
from services.dflash.drafter_config import DrafterConfig
from services.dflash.head import FrozenHead
from services.dflash.loss import LossOptions
from services.dflash.pack import pack_loss

GOLDEN = Path(__file__).with_name("dflash_loss.json")
LENGTHS = (19, 1, 33, 4)
CONFIG = DrafterConfig(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=61,
    num_target_layers=9,
    target_layer_ids=(1, 4),
    block_size=8,
    mask_token_id=60,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    max_position_embeddings=128,
    layer_types=("sliding_attention", "full_attention", "full_attention"),
    sliding_window=7,
    input_embedding_scale=1.7,
    output_multiplier=0.8,
    final_logit_softcapping=4.0,
)


def numbers(rows, columns, step):
    """Deterministic, irregular, free of any generator: sin of a quadratic sequence."""
    index = torch.arange(rows * columns, dtype=torch.float64)
    return torch.sin(step * index + 0.01 * index.square()).view(rows, columns)


def golden_case():
    tokens = sum(LENGTHS)
    weights = {
        name: numbers(tensor.shape[0], tensor.shape[1], 0.7 + 0.01 * place) * 0.3
        if tensor.dim() == 2
        else 1 + 0.2 * numbers(1, tensor.numel(), 0.3 + 0.01 * place)[0]
        for place, (name, tensor) in enumerate(Drafter(CONFIG, seed=0).state_dict().items())
    }
    inputs = {
        "features_TF": numbers(tokens, CONFIG.feature_size, 0.37),
        "input_ids_T": torch.tensor([(7 * i * i + 3 * i) % 59 for i in range(tokens)]),
        "loss_mask_T": torch.tensor([int(i % 11 > 2) for i in range(tokens)], dtype=torch.uint8),
        "position_ids_T": torch.tensor([i for length in LENGTHS for i in range(length)]),
        "document_offsets": torch.tensor([0, 19, 20, 53, 57], dtype=torch.int32),
    }
    embedding, head = numbers(61, 24, 0.53), numbers(61, 24, 0.91)
    return weights, inputs, embedding, head, numbers(tokens, 24, 0.29)


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * weight


def turn(x, positions):
    """Rotary positions as complex rotations of (i, i + half) pairs; x [rows, heads, size]."""
    half = x.shape[-1] // 2
    angle = torch.tensor(
        [[p / CONFIG.rope_theta ** (2 * i / x.shape[-1]) for i in range(half)] for p in positions],
        dtype=torch.float64,
    )[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def reference_block(w, context, positions, rows, block_positions):
    """One block's hidden rows, its keys assembled by hand."""
    heads, groups, size = CONFIG.num_attention_heads, CONFIG.num_key_value_heads, CONFIG.head_dim
    x, count = rows, len(rows)
    for layer in range(CONFIG.num_hidden_layers):
        p = {
            key.removeprefix(f"layers.{layer}."): value
            for key, value in w.items()
            if f"layers.{layer}." in key
        }
        a = {key.removeprefix("self_attn."): value for key, value in p.items()}
        h = norm(x, p["input_layernorm.weight"])
        keys_in, at = torch.cat((context, h)), [*positions, *block_positions]
        q = turn(
            norm((h @ a["q_proj.weight"].T).view(count, heads, size), a["q_norm.weight"]), block_positions
        )
        k = turn(norm((keys_in @ a["k_proj.weight"].T).view(-1, groups, size), a["k_norm.weight"]), at)
        v = (keys_in @ a["v_proj.weight"].T).view(-1, groups, size)
        mixed = []
        for slot in range(count):
            seen = list(range(len(at)))
            if CONFIG.layer_types[layer] == "sliding_attention":
                here = block_positions[slot]
                seen = [j for j in seen if here - at[j] < CONFIG.sliding_window and at[j] <= here]
            out = []
            for head in range(heads):
                group = head // (heads // groups)
                share = torch.softmax(k[seen, group] @ q[slot, head] / math.sqrt(size), 0)
                out.append(share @ v[seen, group])
            mixed.append(torch.cat(out))
        x = x + torch.stack(mixed) @ a["o_proj.weight"].T
        m = norm(x, p["post_attention_layernorm.weight"])
        gate, up = m @ p["mlp.gate_proj.weight"].T, m @ p["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ p["mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"])


def reference_sums(kind, w, inputs, embedding, head, last_hidden, anchors):
    """(loss sum, weight sum) in float64."""

    def logits(hidden):
        return 4.0 * torch.tanh(0.8 * (hidden @ head.T) / 4.0)

    features, ids, mask = (
        inputs["features_TF"],
        inputs["input_ids_T"].tolist(),
        inputs["loss_mask_T"].tolist(),
    )
    starts = [0, 19, 20, 53, 57]
    H = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    loss, weight = torch.zeros((), dtype=torch.float64), 0.0
    for anchor in anchors:
        first = max(start for start in starts if start <= anchor)
        end = min(start for start in starts if start > anchor)
        local = list(range(anchor - first))
        block = [anchor - first + k for k in range(8)]
        rows = torch.stack([embedding[ids[anchor]]] + [embedding[60]] * 7) * 1.7
        z = logits(reference_block(w, H[first:anchor], local, rows, block)).log_softmax(-1)
        real = [k for k in range(1, 8) if anchor + k < end and mask[anchor + k]]
        losses = {}
        for k in real:
            wanted = logits(last_hidden[anchor + k - 1]).log_softmax(-1)
            losses[k] = (wanted.exp() * (wanted - z[k])).sum() if kind == "kl" else -z[k, ids[anchor + k]]
        survival = {k: 0.5 * math.exp(-float(losses[k].detach())) + 0.5 for k in real}
        for k in real:
            if kind == "dpace":
                count = sum(math.prod(survival[i] for i in real if i <= j) for j in real if j >= k)
            else:
                count = math.exp(-(k - 1) / 4.0)
            loss, weight = loss + count * losses[k], weight + count
    return loss, weight


@pytest.mark.parametrize("kind", ["ce", "kl", "dpace"])
def test_loss_and_gradients_equal_the_dense_reference(kind):
    weights, inputs, embedding, head, last_hidden = golden_case()
    anchors = draw_anchors(inputs["loss_mask_T"], inputs["document_offsets"], 17, 3)
    drafter = Drafter(CONFIG, seed=0)
    drafter.load_state_dict(weights)
    mine = pack_loss(
        drafter,
        embedding.float(),
        FrozenHead(head.float(), 0.8, 4.0),
        **{name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()},
        anchors=anchors,
        loss=LossOptions(kind),
        last_hidden_TH=last_hidden.float(),
    )
    mine.loss_sum.backward()

    exact = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    loss, weight = reference_sums(
        kind, exact, inputs, embedding, head, last_hidden, anchors.positions_A.tolist()
    )
    loss.backward()
    assert float(mine.loss_sum.detach()) == pytest.approx(loss.item(), rel=2e-6)
    assert float(mine.weight_sum) == pytest.approx(weight, rel=2e-6)
    for name, parameter in drafter.named_parameters():
        scale = float(exact[name].grad.abs().max())
        gap = float((parameter.grad - exact[name].grad).abs().max())
        assert gap <= 2e-5 * max(scale, 1e-3), (name, gap, scale)

    stored = json.loads(GOLDEN.read_text())[kind]
    assert stored["anchors"] == anchors.positions_A.tolist()
    assert loss.item() == pytest.approx(stored["loss_sum"], rel=1e-12)
    assert weight == pytest.approx(stored["weight_sum"], rel=1e-12)
    for name, size in stored["gradient_norms"].items():
        assert float(exact[name].grad.norm()) == pytest.approx(size, rel=1e-9)
