"""A descriptor is followed only if every byte it names is in its slot."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transport_packs import BATCH, attempt

from protocol.descriptors import ITEM_BYTES, check_descriptor, section_bytes
from protocol.errors import DecodeError
from protocol.messages import Descriptor, Section
from services.config.schema import Config, Data, Model, Plan, Recipe, Target
from services.transport.layout import bytes_per_token, pack_sections, payload_bytes, slot_bytes
from services.transport.views import view

TOKENS, DOCUMENTS = 100, 3


def config(split: bool = False, loss: str = "ce", dtype: str = "bfloat16", budget: int = TOKENS) -> Config:
    return Config(
        model=Model(path="m", dtype=dtype),
        data=Data(path="d"),
        plan=Plan(token_budget=budget),
        target=Target(split_fc_layers=split),
        recipe=Recipe(loss=loss),
    )


def descriptor(split: bool = False, loss: str = "ce") -> Descriptor:
    sections = pack_sections(config(split, loss), hidden=16, taps=3, tokens=TOKENS, documents=DOCUMENTS)
    return Descriptor(
        arena="target-1.arena",
        slot=1,
        batch=BATCH,
        attempt=attempt(1),
        tokens=TOKENS,
        payload_bytes=payload_bytes(sections),
        checksum=None,
        sections=sections,
    )


def check(checked: Descriptor, slot_bytes: int | None = None) -> None:
    check_descriptor(checked, slots=2, slot_bytes=checked.payload_bytes if slot_bytes is None else slot_bytes)


def with_section(which: str, **changes: object) -> Descriptor:
    good = descriptor()
    sections = tuple(s.model_copy(update=changes) if s.name == which else s for s in good.sections)
    return good.model_copy(update={"sections": sections})


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_what_the_layout_makes_is_accepted(split: bool, loss: str) -> None:
    good = descriptor(split, loss)
    check(good)
    names = {section.name for section in good.sections}
    assert ("last_hidden" in names) == (loss == "kl")
    assert ("features.2" in names) == split


@pytest.mark.parametrize(
    ("recipe", "needed"),
    [({}, False), ({"loss": "dpace"}, False), ({"loss": "kl"}, True), ({"labels": "target"}, True)],
)
def test_the_last_hidden_state_is_shipped_where_loss_or_labels_need_it(recipe, needed) -> None:
    plain = config()
    changed = plain.model_copy(update={"recipe": plain.recipe.model_copy(update=recipe)})
    sections = pack_sections(changed, hidden=16, taps=3, tokens=8, documents=1)
    assert ("last_hidden" in {section.name for section in sections}) == needed


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (descriptor().model_copy(update={"slot": 2}), "slot 2 of an arena of 2"),
        (with_section("features", offset=2**62), "overlaps another|sections end at"),
        (with_section("sample_ids", offset=2**62), "sections end at"),
        (with_section("input_ids", offset=9600 + 4), "no multiple of 64"),
        (with_section("input_ids", offset=0), "overlaps another"),
        (with_section("features", dtype="uint8"), "features is uint8"),
        (with_section("input_ids", dtype="uint8"), "input_ids is uint8"),
        (with_section("loss_mask", shape=(10, 10)), r"loss_mask is uint8 \[10, 10\]"),
        (with_section("features", shape=(TOKENS - 1, 48)), "features has 99 rows, it must have 100"),
        (with_section("document_offsets", shape=(3,)), "document_offsets has 3 rows, it must have 4"),
        (with_section("position_ids", name="positions"), "sections .*positions"),
        (with_section("position_ids", name="input_ids"), "once each"),
        (with_section("features", name="features.1"), "once each"),
        (with_section("features", name="features.00"), "once each"),
        (descriptor().model_copy(update={"sections": ()}), "once each"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name(bad: Descriptor, said: str) -> None:
    with pytest.raises(DecodeError, match=said):
        check(bad)


def test_a_payload_larger_than_a_slot_is_refused() -> None:
    with pytest.raises(DecodeError, match="in slots of 100"):
        check(descriptor(), slot_bytes=100)


@settings(deadline=None)
@given(st.data())
def test_an_accepted_section_lies_inside_the_payload(data: st.DataObject) -> None:
    good = descriptor(split=data.draw(st.booleans()))
    number = st.integers(0, 200) | st.integers(0, 2**63 - 1)
    sections = []
    for section in good.sections:
        changes = data.draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "offset": number | number.map(lambda n: n // 64 * 64),
                    "shape": st.lists(number, max_size=4).map(tuple),
                    "dtype": st.sampled_from(sorted(ITEM_BYTES)),
                },
            )
            if data.draw(st.integers(0, 3)) == 0
            else st.just({})
        )
        try:
            sections.append(Section.model_validate(section.model_dump() | changes))
        except ValidationError:
            return
    changed = good.model_copy(update={"sections": tuple(sections)})
    try:
        check(changed)
    except DecodeError:
        return
    payload_B = torch.zeros(changed.payload_bytes, dtype=torch.uint8)
    for section in changed.sections:
        assert section.offset + section_bytes(section) <= changed.payload_bytes
        assert view(payload_B, section).shape == section.shape


def test_a_slot_holds_the_largest_pack_and_little_more() -> None:
    size = slot_bytes(config(loss="kl"), hidden=16, taps=3, max_documents=TOKENS)
    per_token = bytes_per_token(config(loss="kl"), hidden=16, taps=3)
    assert per_token == 4 * 16 * 2 + 9
    ids_of_documents = 12 * TOKENS + 4
    assert TOKENS * per_token + ids_of_documents <= size <= TOKENS * per_token + ids_of_documents + 8 * 64
    split = slot_bytes(config(split=True, loss="kl"), hidden=16, taps=3, max_documents=TOKENS)
    assert abs(split - size) <= 3 * 64


def test_a_qwen3_8b_pack_is_160_mib() -> None:
    whole = slot_bytes(config(budget=4096), hidden=4096, taps=5, max_documents=64)
    assert bytes_per_token(config(), hidden=4096, taps=5) == 40_969
    assert whole == pytest.approx(160 << 20, rel=0.001)
