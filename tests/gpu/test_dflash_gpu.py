"""The method on a GPU: flex attention and its gradients, nothing waits, nothing recompiles, equal anchors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from services.dflash.anchors import draw_anchors
from services.dflash.drafter import Drafter
from services.dflash.drafter_config import DrafterConfig
from services.dflash.evaluate import evaluate
from services.dflash.head import FrozenHead, best_ids
from services.dflash.loss import LossOptions
from services.dflash.noise import add_noise_
from services.dflash.pack import pack_loss
from services.dflash.prompts import Prompt
from services.dflash.self_check import self_check
from services.dflash.taps import PackBuffer, TapCapture, packed_rows
from services.dflash.target_model import wrap_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # of compilers
]


def config(size: int = 16, *, sliding: bool = False) -> DrafterConfig:
    kind = "sliding_attention" if sliding else "full_attention"
    return DrafterConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=3001,
        num_target_layers=8,
        target_layer_ids=(1, 3, 5),
        block_size=size,
        mask_token_id=3000,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=4096,
        layer_types=(kind, "full_attention"),
        sliding_window=40 if sliding else 0,
    )


class Case:
    """A drafter on the GPU, frozen ends, and random packs for it."""

    def __init__(self, shape: DrafterConfig, dtype: torch.dtype = torch.float32) -> None:
        self.shape, self.dtype = shape, dtype
        self.drafter = Drafter(shape, seed=0).cuda()
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(3001, 256, generator=generator).to("cuda", dtype)
        self.head = FrozenHead(0.1 * torch.randn(3001, 256, generator=generator).to("cuda", dtype))

    def pack(self, lengths: list[int], seed: int = 0, supervised: float = 0.8) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(lengths)
        pack = {
            "features_TF": torch.randn(tokens, self.shape.feature_size, generator=generator).to(self.dtype),
            "input_ids_T": torch.randint(0, 2900, (tokens,), generator=generator, dtype=torch.int32),
            "loss_mask_T": (torch.rand(tokens, generator=generator) < supervised).to(torch.uint8),
            "position_ids_T": torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
            "document_offsets": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            "last_hidden_TH": torch.randn(tokens, 256, generator=generator).to(self.dtype),
        }
        return {name: tensor.cuda() for name, tensor in pack.items()}

    def sums(self, pack, slots=96, seed=1, *, kind="ce", attention="auto"):
        anchors = draw_anchors(pack["loss_mask_T"], pack["document_offsets"], slots, seed)
        how = {"anchors": anchors, "loss": LossOptions(kind), "attention": attention, "dtype": self.dtype}
        return pack_loss(self.drafter, self.embedding, self.head, **pack, **how)

    def gradient(self, *args, **options) -> tuple[torch.Tensor, ...]:
        self.drafter.zero_grad(set_to_none=True)
        sums = self.sums(*args, **options)
        sums.loss_sum.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in self.drafter.parameters()])
        return (*(part.detach() for part in sums), flat)


@contextmanager
def no_host_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["ce", "kl", "dpace"])
@pytest.mark.parametrize(("size", "sliding"), [(16, False), (10, True)])
def test_flex_equals_the_dense_reference_with_gradients(size, sliding, kind):
    case = Case(config(size, sliding=sliding))
    pack = case.pack([300, 5, 1, 211, 130])
    flex, dense = case.gradient(pack, kind=kind), case.gradient(pack, kind=kind, attention="reference")
    for mine, theirs in zip(flex[:-1], dense[:-1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-2, rtol=1e-5)
    gap, scale = float((flex[-1] - dense[-1]).abs().max()), float(dense[-1].abs().max())
    assert gap <= 1e-4 * scale


def test_bfloat16_gradients_stay_near_the_dense_reference():
    """Other tiles than float32's; a row that a tile turned into NaN, or left out, would show."""
    case = Case(config(sliding=True), torch.bfloat16)
    pack = case.pack([300, 5, 1, 211, 130])
    flex, dense = (case.gradient(pack, attention=kind)[-1] for kind in ("auto", "reference"))
    assert float((flex - dense).norm()) <= 0.05 * float(dense.norm())


def test_the_gpu_path_equals_the_cpu_path():
    case = Case(config())
    pack = case.pack([300, 5, 1, 211])
    gpu = case.gradient(pack)
    case.drafter.cpu()
    case.embedding, case.head = case.embedding.cpu(), FrozenHead(case.head.weight_VH.cpu())
    cpu = case.gradient({name: tensor.cpu() for name, tensor in pack.items()})
    for mine, theirs in zip(gpu[:-1], cpu[:-1], strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, atol=1e-2, rtol=1e-4)
    assert float((gpu[-1].cpu() - cpu[-1]).abs().max()) <= 1e-3 * float(cpu[-1].abs().max())


def test_a_pack_without_an_anchor_gives_zeros():
    case = Case(config(), torch.bfloat16)
    assert not any(part.any() for part in case.gradient(case.pack([40, 9], supervised=0.0)))


def test_steps_wait_for_nothing_and_compile_nothing_after_the_first():
    case = Case(config(sliding=True), torch.bfloat16)
    packs = [
        case.pack(lengths, seed)
        for seed, lengths in enumerate(([300, 90], [500, 70, 1, 200], [1000], [3, 3]))
    ]
    case.gradient(packs[0])
    torch.cuda.synchronize()
    with torch.compiler.set_stance("fail_on_recompile"), no_host_synchronisation():
        results = [case.gradient(pack) for pack in packs]
    assert all(part.isfinite().all() for result in results for part in result)


def test_deterministic_kernels_repeat_every_bit():
    case = Case(config(sliding=True), torch.bfloat16)
    pack = case.pack([300, 90, 400])
    torch.use_deterministic_algorithms(True)
    try:
        for kind in ("ce", "kl", "dpace"):
            first, second = case.gradient(pack, kind=kind), case.gradient(pack, kind=kind)
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_anchors_and_uniform_noise_are_those_of_a_cpu():
    case = Case(config())
    pack = case.pack([300, 5, 1, 211, 130])
    where = pack["loss_mask_T"], pack["document_offsets"]
    for seed in range(5):
        gpu, cpu = draw_anchors(*where, 200, seed), draw_anchors(*(x.cpu() for x in where), 200, seed)
        assert torch.equal(gpu.positions_A.cpu(), cpu.positions_A)
        noisy = [
            add_noise_(rows.clone(), kind="uniform", scale=0.1, seed=seed)
            for rows in (pack["features_TF"], pack["features_TF"].cpu())
        ]
        assert torch.equal(noisy[0].cpu(), noisy[1])


def tiny_target(dtype: torch.dtype):
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=3001,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.1,
    )
    return wrap_target(AutoModelForCausalLM.from_config(shape, dtype=dtype).cuda())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taps_are_captured_without_waiting(dtype):
    target = tiny_target(dtype)
    assert self_check(target, (1, 3, 5))["taps"] == 0.0
    lengths = (40, 64, 7)
    ids, rows = torch.randint(0, 3000, (3, 64)).cuda(), packed_rows(lengths, 64).cuda()
    buffer = PackBuffer.allocate(128, 3, 256, split=True, last_hidden=False, dtype=dtype, device="cuda")
    with TapCapture(target, (1, 3, 5)) as capture:
        capture.run(ids, rows, buffer)
        torch.cuda.synchronize()
        with no_host_synchronisation():
            capture.run(ids, rows, buffer)
    assert buffer.sections(111)["features.2"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_is_lossless(dtype):
    target = tiny_target(dtype)
    drafter = Drafter(config(8), seed=0)
    prompts = [Prompt(tuple(range(seed, seed + 20)), "") for seed in range(3)]
    result = evaluate(target, drafter, prompts, max_new_tokens=40, stop_ids=())
    assert result.lossless, result.to_dict()
    together = evaluate(target, drafter, prompts, max_new_tokens=40, stop_ids=(), plain=False, batch=2)
    assert together.lossless, together.to_dict()


def test_a_batch_decodes_what_one_prompt_at_a_time_does():
    target, drafter = tiny_target(torch.float32), Drafter(config(8, sliding=True), seed=0)
    prompts = [Prompt(tuple(range(seed, seed + 20 + 7 * seed)), "", seed) for seed in range(9)]
    one, batch = (
        evaluate(target, drafter, prompts, max_new_tokens=40, stop_ids=(), plain=False, batch=rows)
        for rows in (1, 4)
    )
    assert one.lossless and batch.lossless
    same = [
        a.tokens == b.tokens and a.accepted == b.accepted
        for a, b in zip(one.drafted, batch.drafted, strict=True)
    ]
    assert sum(same) >= 8, "more than one tie among nine random answers"


def test_the_best_token_is_not_told_by_logits_that_were_rounded():
    weight_VH = torch.tensor([[1.0, 0.0], [1.0, 2.0**-9], [0.5, 0.0]], dtype=torch.bfloat16).repeat(8, 8)
    hidden_RH = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.bfloat16).repeat(8, 8)
    assert best_ids(hidden_RH.cuda(), FrozenHead(weight_VH.cuda())).tolist() == [1, 0] * 8
