"""A pack's sums: labels, weights, nothing-to-train, padding, and training that works (traps 1, 3, 5, 8)."""

import pytest
import torch
from dflash_packs import embedding_and_head, tiny_pack, without_last_hidden
from dflash_tiny import drafter_config
from dflash_trained import greedy_answers, train_drafter

from services.dflash.anchors import Anchors, draw_anchors
from services.dflash.drafter import Drafter
from services.dflash.head import FrozenHead, best_ids, row_losses
from services.dflash.loss import LossOptions, default_gamma, position_weights
from services.dflash.pack import pack_loss, targets_labels

CONFIG = drafter_config(
    layer_types=("sliding_attention", "full_attention", "full_attention"), sliding_window=8
)
LENGTHS = [30, 3, 1, 46]


def sums(drafter, pack, anchors, *, kind="ce", labels="data", attention="auto", config=CONFIG):
    embedding, head = embedding_and_head(config)
    own = targets_labels(pack.last_hidden_TH, head, pack.input_ids_T)
    return pack_loss(
        drafter,
        embedding,
        head,
        **pack._asdict(),
        anchors=anchors,
        label_ids_T=own if labels == "target" else None,
        loss=LossOptions(kind),
        attention=attention,
    )


def gradient(drafter, result):
    drafter.zero_grad(set_to_none=True)
    result.loss_sum.backward()
    return torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()])


def drawn(pack, slots, seed=4):
    return draw_anchors(pack.loss_mask_T, pack.document_offsets, slots, seed)


@pytest.mark.parametrize("kind", ["ce", "kl", "dpace"])
@pytest.mark.parametrize("slots", [9, 70])
def test_dropping_what_weighs_nothing_changes_nothing(kind, slots):
    """The CPU path drops unused blocks and slots; the reference computes and masks them, as a GPU does."""
    pack, drafter = tiny_pack(LENGTHS, CONFIG), Drafter(CONFIG, seed=1)
    fast = sums(drafter, pack, drawn(pack, slots), kind=kind)
    full = sums(drafter, pack, drawn(pack, slots), kind=kind, attention="reference")
    for mine, theirs in zip(fast, full, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(gradient(drafter, fast), gradient(drafter, full), atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_gives_the_same_sums():
    pack, drafter = tiny_pack(LENGTHS, CONFIG), Drafter(CONFIG, seed=1)
    with torch.no_grad():
        flex = sums(drafter, pack, drawn(pack, 70), attention="flex")
        full = sums(drafter, pack, drawn(pack, 70), attention="reference")
    for mine, theirs in zip(flex, full, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_a_pack_without_an_anchor_is_zero_with_zero_gradients(attention):
    pack, drafter = tiny_pack(LENGTHS, CONFIG, supervised=0.0), Drafter(CONFIG, seed=1)
    result = sums(drafter, pack, drawn(pack, 12), attention=attention)
    assert not any(part.any() for part in result)
    assert not gradient(drafter, result).any()


def test_slots_past_a_document_or_without_supervision_do_not_count():
    pack = tiny_pack([10, 6], CONFIG, supervised=1.0)
    pack.loss_mask_T[5] = 0
    anchors = Anchors(torch.tensor([2, 7, 16]), torch.tensor([True, True, False]))
    result = sums(Drafter(CONFIG, seed=0), pack, anchors)
    # Anchor 2: labels at 3, 4, (5 unsupervised), 6, 7. Anchor 7: labels at 8, 9; then the document ends.
    assert result.count_K.tolist() == [2.0, 2.0, 0.0, 1.0, 1.0]
    weights = position_weights(CONFIG.block_size, 0.0, torch.device("cpu"))
    assert float(result.weight_sum) == pytest.approx(float((result.count_K * weights).sum()))
    assert result.blocks == 2


def test_packs_do_not_leak_into_each_other():
    """Two documents in one pack give the sums of each alone."""
    drafter = Drafter(CONFIG, seed=2)
    both = tiny_pack([25, 31], CONFIG, supervised=0.9)
    anchors = drawn(both, 20)
    together = sums(drafter, both, anchors)
    parts = []
    for first, last in ((0, 25), (25, 56)):
        alone = type(both)(
            *(tensor[first:last] for tensor in both[:4]), torch.tensor([0, last - first]), both[5][first:last]
        )
        inside = (anchors.positions_A >= first) & (anchors.positions_A < last)
        parts.append(
            sums(drafter, alone, Anchors(anchors.positions_A[inside] - first, anchors.valid_A[inside]))
        )
    for whole, left, right in zip(together, *parts, strict=True):
        torch.testing.assert_close(whole, left + right, atol=1e-4, rtol=1e-5)


def test_rows_that_pad_a_pack_change_nothing():
    pack, drafter = tiny_pack(LENGTHS, CONFIG), Drafter(CONFIG, seed=1)
    more = 48
    padded = pack._replace(
        **{
            name: torch.cat((tensor, torch.zeros(more, *tensor.shape[1:], dtype=tensor.dtype)))
            for name, tensor in pack._asdict().items()
            if name != "document_offsets"
        },
        document_offsets=torch.cat((pack.document_offsets, pack.document_offsets[-1:].repeat(3))),
    )
    for attention in ("auto", "reference"):
        short = sums(drafter, pack, drawn(pack, 20), attention=attention)
        long = sums(drafter, padded, drawn(padded, 20), attention=attention)
        for mine, theirs in zip(short, long, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ce", "kl", "dpace"])
def test_steps_lower_the_loss(kind):
    pack, drafter = tiny_pack([40, 24], CONFIG, supervised=0.9), Drafter(CONFIG, seed=1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for step in range(25):
        result = sums(drafter, pack, drawn(pack, 16, seed=step), kind=kind)
        optimizer.zero_grad()
        (result.loss_sum / result.weight_sum).backward()
        optimizer.step()
        losses.append(float(result.loss_sum.detach() / result.weight_sum))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("kind", ["ce", "kl", "dpace"])
def test_the_targets_labels_are_what_it_finds_best_after_the_text_before(monkeypatch, kind):
    pack, drafter = tiny_pack(LENGTHS, CONFIG), Drafter(CONFIG, seed=1)
    _, head = embedding_and_head(CONFIG)
    best_T = [int(head.logits(row_H).argmax()) for row_H in pack.last_hidden_TH]
    anchors, ends, expected = drawn(pack, 20), pack.document_offsets[1:].tolist(), []
    for anchor in anchors.positions_A[anchors.valid_A].tolist():
        end = next(end for end in ends if anchor < end)
        places = range(anchor + 1, min(anchor + CONFIG.block_size, end))
        expected += [best_T[place - 1] for place in places if pack.loss_mask_T[place]]
    given = []

    def spy(hidden_RH, head, labels_R, teacher_RH=None):
        given.append(labels_R.tolist())
        return row_losses(hidden_RH, head, labels_R, teacher_RH)

    monkeypatch.setattr("services.dflash.pack.row_losses", spy)
    own = sums(drafter, pack, anchors, kind=kind, labels="target")
    full = sums(drafter, pack, anchors, kind=kind, labels="target", attention="reference")
    data = sums(drafter, pack, anchors, kind=kind)
    assert given[0] == expected != given[2]
    for mine, theirs in zip(own, full, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)
    assert torch.equal(own.count_K, data.count_K)


def test_on_the_targets_own_greedy_text_both_labels_are_the_same():
    trained = train_drafter("llama", steps=1)
    ids = greedy_answers(trained.target)
    with torch.inference_mode():
        last = trained.target.base(input_ids=ids, use_cache=False).last_hidden_state
    best = torch.stack([best_ids(row, trained.target.head) for row in last])
    assert torch.equal(best[:, 3:-1], ids[:, 4:])


def test_the_best_token_is_not_told_by_logits_that_were_rounded():
    """1 and 1 + 2**-9 are one number in bfloat16; the second token has the larger logit."""
    weight_VH = torch.tensor([[1.0, 0.0], [1.0, 2.0**-9], [0.5, 0.0]], dtype=torch.bfloat16)
    hidden_RH = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.bfloat16)
    assert (hidden_RH @ weight_VH.T)[0].argmax() == 0
    assert best_ids(hidden_RH, FrozenHead(weight_VH)).tolist() == [1, 0]


def test_accepted_prefixes_are_counted():
    """A head that always says the label: every block is accepted as far as it has labels."""
    pack = tiny_pack([12], CONFIG, supervised=1.0)
    pack = pack._replace(input_ids_T=torch.zeros(12, dtype=torch.int32))
    embedding, head = embedding_and_head(CONFIG)
    weight = torch.zeros_like(head.weight_VH)
    anchors = Anchors(torch.tensor([0, 9]), torch.tensor([True, True]))
    drafter = Drafter(CONFIG, seed=0)
    result = pack_loss(
        drafter,
        embedding,
        FrozenHead(weight),
        **without_last_hidden(pack),
        anchors=anchors,
        loss=LossOptions(),
    )
    # All logits tie at zero, and of equals the first token is taken: 1 + 5 drafts, and 1 + 2 at the end.
    assert result.accepted_sum == 9 and result.correct_K.tolist() == result.count_K.tolist()


@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, 0.0), (0.6, 0.0), (1.3, 5.0)])
def test_chunks_of_the_head_equal_full_logits(monkeypatch, multiplier, softcap, teacher):
    monkeypatch.setattr("services.dflash.head.CPU_CHUNK_ROWS", 4)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 32, generator=generator, requires_grad=True)
    target = torch.randn(11, 32, generator=generator) if teacher else None
    labels = torch.randint(0, 97, (11,), generator=generator)
    scale = torch.rand(11, generator=generator)
    head = FrozenHead(torch.randn(97, 32, generator=generator), multiplier, softcap)

    def full(rows):
        logits = rows @ head.weight_VH.T * multiplier
        return torch.tanh(logits / softcap) * softcap if softcap else logits

    found = row_losses(hidden, head, labels, target)
    (mine,) = torch.autograd.grad((found.loss_R * scale).sum(), hidden)
    log_draft = full(hidden).log_softmax(-1)
    if target is None:
        wanted = torch.nn.functional.nll_loss(log_draft, labels, reduction="none")
    else:
        wanted = torch.nn.functional.kl_div(log_draft, full(target).softmax(-1), reduction="none").sum(-1)
    (theirs,) = torch.autograd.grad((wanted * scale).sum(), hidden)
    torch.testing.assert_close(found.loss_R, wanted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.correct_R, full(hidden).argmax(-1) == labels)


def test_gamma_follows_the_papers_blocks():
    assert [default_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]
    sizes = [default_gamma(size) for size in range(2, 40)]
    assert sizes == sorted(sizes)
    assert position_weights(4, 2.0, torch.device("cpu")).tolist() == pytest.approx(
        [1.0, 0.60653, 0.36788], abs=1e-5
    )
