"""Hidden states of the tapped layers, packed without padding while the target's forward runs.

    right-padded ids [batch, S] --text tower: no head, cache or mask--> hooks: real rows -> buffer [T, .]

Causal attention with padding on the right needs no mask: a real row never sees a padded one. A hook
on each tapped layer copies the rows of real tokens straight into a persistent buffer, on the stream
the forward runs on; packing on another stream raced with the next forward and gave NaN. The index of
real rows is computed ahead from the lengths, so nothing waits for the device.
Without `last_hidden`, layers behind the last tap are not run (2 of 36 at Qwen3-8B's taps).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import masking_utils

from services.dflash.target_model import Target


def packed_rows(lengths: Sequence[int], padded_length: int) -> Tensor:
    """int64 [T] on the CPU: row b * S + t of every real token of a right-padded batch, samples in order."""
    counts = np.asarray(lengths, dtype=np.int64)
    assert counts.size and counts.max() <= padded_length, "a sample is longer than its bucket"
    starts = np.repeat(np.arange(counts.size) * padded_length - (np.cumsum(counts) - counts), counts)
    return torch.from_numpy(starts + np.arange(counts.sum()))


@dataclass(frozen=True)
class PackBuffer:
    """Persistent memory for the hidden states of one pack of up to `capacity` tokens.

    `features`: one tensor [capacity, D*H], or D tensors [capacity, H]; `last_hidden` [capacity, H].
    """

    features: Tensor | tuple[Tensor, ...]
    last_hidden: Tensor | None

    @classmethod
    def allocate(
        cls,
        capacity: int,
        taps: int,
        hidden_size: int,
        *,
        split: bool,
        last_hidden: bool,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> PackBuffer:
        """Zeroed, so that rows a pack leaves unused are finite."""

        def rows(width: int) -> Tensor:
            return torch.zeros(capacity, width, dtype=dtype, device=device)

        features = tuple(rows(hidden_size) for _ in range(taps)) if split else rows(taps * hidden_size)
        return cls(features, rows(hidden_size) if last_hidden else None)

    @property
    def capacity(self) -> int:
        return (self.features if isinstance(self.features, Tensor) else self.features[0]).shape[0]

    def tap(self, index: int, tokens: int, hidden_size: int) -> Tensor:
        """View [tokens, H] that tap `index` is written to."""
        if isinstance(self.features, Tensor):
            return self.features[:tokens, index * hidden_size : (index + 1) * hidden_size]
        return self.features[index][:tokens]

    def sections(self, tokens: int) -> dict[str, Tensor]:
        """Views of the real rows by section name: `features`, or `features.0` .. , and `last_hidden`."""
        if isinstance(self.features, Tensor):
            found = {"features": self.features[:tokens]}
        else:
            found = {f"features.{index}": tap[:tokens] for index, tap in enumerate(self.features)}
        if self.last_hidden is not None:
            found["last_hidden"] = self.last_hidden[:tokens]
        return found


class TapCapture:
    """Runs the target's text tower over a batch and leaves its tapped rows in a buffer.

    One forward at a time. `close()` removes the hooks and gives the target its last layers back.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int], *, last_hidden: bool = False) -> None:
        self.target, self.layer_ids, self.last_hidden = target, tuple(layer_ids), last_hidden
        self.hidden_size: int = target.config.hidden_size
        self._rows_T: Tensor | None = None
        self._buffer: PackBuffer | None = None
        self._hooks = [
            target.layers[layer].register_forward_hook(self._hook(index))
            for index, layer in enumerate(self.layer_ids)
        ]
        self._behind = [] if last_hidden else list(target.layers[max(self.layer_ids) + 1 :])
        del target.layers[len(target.layers) - len(self._behind) :]

    def run(self, input_ids: Tensor, rows_T: Tensor, buffer: PackBuffer) -> None:
        """Captures `rows_T` (see `packed_rows`) of int64 `input_ids` [batch, S], both on the target's device.

        On the current stream, without host synchronisation. The rows are written once work queued
        before this call's return has run; record an event then.
        """
        assert rows_T.numel() <= buffer.capacity, "the pack is larger than its buffer"
        self._rows_T, self._buffer = rows_T, buffer
        with torch.inference_mode(), _positions_never_restart():
            output = self.target.base(input_ids=input_ids, use_cache=False)
            if self.last_hidden:
                assert buffer.last_hidden is not None, "the buffer has no room for the last hidden state"
                self._copy(output.last_hidden_state, buffer.last_hidden[: rows_T.numel()])
        self._rows_T = self._buffer = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.target.layers.extend(self._behind)
        self._hooks, self._behind = [], []

    def __enter__(self) -> TapCapture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hook(self, index: int) -> Any:
        def copy_rows(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            assert self._rows_T is not None and self._buffer is not None, "a forward outside of run()"
            hidden = output if isinstance(output, Tensor) else output[0]
            self._copy(hidden, self._buffer.tap(index, self._rows_T.numel(), self.hidden_size))

        return copy_rows

    def _copy(self, hidden: Tensor, place_TH: Tensor) -> None:
        assert self._rows_T is not None
        torch.index_select(hidden.flatten(0, 1), 0, self._rows_T, out=place_TH)


@contextmanager
def _positions_never_restart() -> Iterator[None]:
    """Answers for Transformers a question that it would ask the device, waiting for the answer.

    Without a mask and a cache it looks whether positions restart inside a row (packed sequences); here
    they never do. One synchronisation a forward would keep the host from running ahead.
    """
    asked = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asked


class TapReader:
    """Joined taps of the model's latest forward, for decoding."""

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        self._taps: list[Tensor | None] = [None] * len(layer_ids)
        self._hooks = [
            target.layers[layer].register_forward_hook(self._hook(index))
            for index, layer in enumerate(layer_ids)
        ]

    def __enter__(self) -> TapReader:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def features(self) -> Tensor:
        """[tokens, D*H] of the one sequence in the batch."""
        return self.batch()[0]

    def batch(self) -> Tensor:
        """[sequences, tokens, D*H]."""
        taps = [tap for tap in self._taps if tap is not None]
        assert len(taps) == len(self._taps), "no forward has run yet"
        return torch.cat(taps, dim=-1)

    def _hook(self, index: int) -> Any:
        def keep(_layer: nn.Module, _inputs: Any, output: Any) -> None:
            self._taps[index] = output if isinstance(output, Tensor) else output[0]

        return keep
