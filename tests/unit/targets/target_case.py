"""One family's target as a user has it: written by Transformers, loaded by us, the original beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from target_families import FAMILIES, HIDDEN, MASK, TAPS, Family, model_of
from torch import Tensor

from services.config import schema
from services.dflash.drafter_config import DrafterConfig, derive
from services.dflash.taps import PackBuffer, TapCapture, packed_rows
from services.dflash.target_model import Target, load_target

LENGTHS = (21, 1, 75, 40)  # across windows of 8 and the 64 tokens that recurrent layers compute at once
PADDED = 80
OPTIONS = schema.Drafter(layers=2, taps=2, mask_token_id=MASK, block_size=4)


@dataclass
class Case:
    """`original` made the files; `target` came out of them. Untied unless the family cannot be."""

    name: str
    family: Family
    folder: Path
    original: Any
    target: Target

    @classmethod
    def make(cls, name: str, folder: Path) -> Case:
        family = FAMILIES[name]
        original = model_of(family, tied=False)
        original.save_pretrained(folder)
        return cls(name, family, folder, original, load_target(folder, attention=family.attention))

    @cached_property
    def drafter(self) -> DrafterConfig:
        return derive(self.target.config, OPTIONS, None, stop_ids=self.target.stop_ids)

    @cached_property
    def ids(self) -> Tensor:
        """int64 [samples, PADDED]; what stands behind a sample's length is noise, not pad tokens."""
        return torch.randint(3, 96, (len(LENGTHS), PADDED), generator=torch.Generator().manual_seed(3))

    @cached_property
    def captured(self) -> PackBuffer:
        """The packed batch through our capture."""
        tokens = sum(LENGTHS)
        buffer = PackBuffer.allocate(
            tokens, len(TAPS), HIDDEN, split=False, last_hidden=True, dtype=torch.float32, device="cpu"
        )
        with TapCapture(self.target, TAPS, last_hidden=True) as capture:
            capture.run(self.ids, packed_rows(LENGTHS, PADDED), buffer)
        return buffer

    def asked(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the original says of `ids` by its own interface: joined taps, logits, input of layer 0."""
        with torch.inference_mode():
            output = self.original(input_ids=ids, output_hidden_states=True, use_cache=False)
        states = output.hidden_states
        return torch.cat([states[tap + 1] for tap in TAPS], dim=-1), output.logits, states[0]

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """`asked` of the padded batch, real rows only."""
        rows = packed_rows(LENGTHS, PADDED)
        taps, logits, first = self.asked(self.ids)
        return taps.flatten(0, 1)[rows], logits.flatten(0, 1)[rows], first.flatten(0, 1)[rows]

    @cached_property
    def alone(self) -> tuple[Tensor, Tensor]:
        """Taps and logits of each sample by itself, without padding."""
        found = [self.asked(self.ids[i : i + 1, :length]) for i, length in enumerate(LENGTHS)]
        return torch.cat([taps[0] for taps, _, _ in found]), torch.cat([logits[0] for _, logits, _ in found])


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest over rows of |found - expected| / |expected|."""
    gap, size = (found - expected).float().norm(dim=-1), expected.float().norm(dim=-1)
    return float((gap / size.clamp(min=1e-6)).max())


@dataclass(frozen=True)
class Figures:
    """A row of the table in docs/targets.md: largest relative error of any row, float32."""

    taps: float  # captured against `output_hidden_states` of the same batch
    logits: float  # our head on the captured last hidden state against the model's logits
    ragged: float  # captured from the padded batch against each sample alone

    @classmethod
    def of(cls, case: Case) -> Figures:
        logits = case.target.logits(case.captured.last_hidden)
        alone, alone_logits = case.alone
        return cls(
            relative(case.captured.features, case.batch[0]),
            relative(logits, case.batch[1]),
            max(relative(case.captured.features, alone), relative(logits, alone_logits)),
        )
