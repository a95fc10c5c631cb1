"""How a batch is laid out for the forward and for its pack."""

import numpy as np
import torch

from services.data.batch import PADDING_ID, gather, made_up
from services.data.dataset import Dataset

EDGES = (16, 32)


def test_a_batch_is_padded_on_the_right_to_the_bucket_of_its_longest_sample(dataset: Dataset) -> None:
    batch = gather(dataset, (0, 4), edges=EDGES, vocabulary=64)
    ids_BS = torch.full((2, batch.padded_length), -1)
    batch.fill(ids_BS)
    assert (batch.padded_length, batch.tokens, batch.lengths) == (32, 35, [5, 30])
    assert ids_BS[0, :5].tolist() == dataset.sample(0).input_ids.tolist()
    assert ids_BS[1, :30].tolist() == dataset.sample(4).input_ids.tolist()
    assert set(ids_BS[0, 5:].tolist()) == {PADDING_ID}


def test_sections_hold_the_real_tokens_back_to_back(dataset: Dataset) -> None:
    sections = gather(dataset, (3, 0), edges=EDGES, vocabulary=64).sections()
    expected = np.concatenate([dataset.sample(3).input_ids, dataset.sample(0).input_ids])
    assert sections["input_ids"].tolist() == expected.tolist()
    assert sections["position_ids"].tolist() == [*range(12), *range(5)]
    assert sections["document_offsets"].tolist() == [0, 12, 17]
    assert sections["sample_ids"].tolist() == [3, 0]
    assert {name: str(section.dtype) for name, section in sections.items()} == {
        "input_ids": "torch.int32", "loss_mask": "torch.uint8", "position_ids": "torch.int32",
        "document_offsets": "torch.int32", "sample_ids": "torch.int64",
    }  # fmt: skip


def test_a_sample_outside_the_embedding_is_left_out_with_its_reason(dataset: Dataset) -> None:
    batch = gather(dataset, (0, 8, 1), edges=EDGES, vocabulary=64)
    assert [document.sample for document in batch.documents] == [0, 1]
    (skipped,) = batch.skipped
    assert skipped.sample == 8
    assert skipped.reason == "token id 64: the target's embedding has rows 0 to 63"


def test_leaving_documents_out_gives_the_rows_that_stay(dataset: Dataset) -> None:
    batch = gather(dataset, (0, 3, 7), edges=EDGES, vocabulary=64)
    rest, rows = batch.without([1], "bad")
    assert rest.sections()["sample_ids"].tolist() == [0, 7]
    assert rows.tolist() == [*range(5), *range(17, 24)]
    assert [(s.sample, s.reason) for s in rest.skipped] == [(3, "bad")]
    nothing, none = rest.without([0, 1], "bad")
    assert nothing.documents == () and none.tolist() == []
    assert [s.sample for s in nothing.skipped] == [3, 0, 7]


def test_made_up_batches_have_the_shape_asked_for_and_fit_the_budget() -> None:
    for documents, edge in ((1, 16), (4, 16), (64, 16), (8, 32)):
        batch = made_up(documents, edge, 64)
        assert len(batch.documents) == documents and batch.padded_length == edge and 0 < batch.tokens <= 64
