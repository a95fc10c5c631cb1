"""The frozen target's forward: from ids on the host to packed taps in a slab, without a host wait.

    pinned staging -> upload -> layers, whose hooks copy the real rows into the slab -> finite? -> `packed`

All of it is issued on one stream, the one that produces the tensors: packing on a second stream raced with
the next forward and gave NaN from step 1. A slab is persistent and owned by one pack until the copier returns
it, so no asynchronous copy ever outlives its source. `postprocess_depth + 1` slabs exist; at 4,096 tokens of
5 x 4,096 bf16 features each is 168 MB.

The host runs ahead of the GPU by one forward, so reading and uploading a batch's ids hides behind the forward
before it. On a CPU it is the forward itself that blocks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from protocol.errors import ModelError
from services.config.schema import Config
from services.data.batch import HostBatch, made_up
from services.data.plan import rows_limit
from services.dflash.drafter_config import DrafterConfig
from services.dflash.taps import PackBuffer, TapCapture, packed_rows
from services.dflash.target_model import Target
from services.target.profile import Mark

log = logging.getLogger(__name__)


class Cancelled(Exception):
    """The forward was left between two layers."""


class Slab:
    """The buffers of one pack between lease and ready: ids staging, taps, finite flags, marks."""

    def __init__(
        self, config: Config, shape: DrafterConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        tokens = config.plan.token_budget
        self.taps = PackBuffer.allocate(
            tokens,
            shape.taps,
            shape.hidden_size,
            split=config.target.split_fc_layers,
            last_hidden=config.recipe.needs_last_hidden,
            dtype=dtype,
            device=device,
        )
        self.ids = _Staging(max_padded_tokens(config), device)
        self.rows = _Staging(tokens, device)
        self.finite_T = torch.empty(tokens, dtype=torch.bool, pin_memory=device.type == "cuda")
        self.begun, self.computed, self.packed = Mark(device), Mark(device), Mark(device)


class Forward:
    """Runs batches of one target, in one thread, on one stream."""

    def __init__(self, config: Config, target: Target, layer_ids: tuple[int, ...]) -> None:
        self._cancel = threading.Event()
        self._hooks = [layer.register_forward_pre_hook(self._leave_if_cancelled) for layer in target.layers]
        self._stream = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
        self._capture = TapCapture(target, layer_ids, last_hidden=config.recipe.needs_last_hidden)

    def run(self, batch: HostBatch, slab: Slab) -> None:
        """Issue the forward of `batch` into `slab`; complete once `slab.packed` is.

        Raises:
            Cancelled: `cancel` was called.
        """
        shape = (len(batch.documents), batch.padded_length)
        batch.fill(slab.ids.host[: shape[0] * shape[1]].view(shape))
        slab.rows.host[: batch.tokens] = packed_rows(batch.lengths, batch.padded_length)
        with torch.no_grad(), self.stream():
            slab.begun.record()
            ids_BS = slab.ids.upload(shape[0] * shape[1]).view(shape)
            self._capture.run(ids_BS, slab.rows.upload(batch.tokens), slab.taps)
            slab.computed.record()
            finite_T = _finite_rows(list(slab.taps.sections(batch.tokens).values()))
            slab.finite_T[: batch.tokens].copy_(finite_T, non_blocking=True)
            slab.packed.record()

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def cancel(self) -> None:
        """Leave a running forward at its next layer; for good."""
        self._cancel.set()

    def close(self) -> None:
        """Leave the model as it was found."""
        self._capture.close()
        for hook in self._hooks:
            hook.remove()

    def _leave_if_cancelled(self, _layer: nn.Module, _inputs: object) -> None:
        if self._cancel.is_set():
            raise Cancelled


class _Staging:
    """int64 values on their way to the device; pinned there, and the same memory on a CPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.host = torch.zeros(size, dtype=torch.int64, pin_memory=cuda)
        self._device = torch.zeros(size, dtype=torch.int64, device=device) if cuda else self.host

    def upload(self, count: int) -> Tensor:
        if self._device is not self.host:
            self._device[:count].copy_(self.host[:count], non_blocking=True)
        return self._device[:count]


def _finite_rows(sections: list[Tensor]) -> Tensor:
    """bool [T]: no section has a NaN or infinity in the row. One fused pass over each, no large temporary."""
    peaks_ST = torch.stack([torch.linalg.vector_norm(x_TF, ord=torch.inf, dim=-1) for x_TF in sections])
    return peaks_ST.isfinite().all(0)


def compile_layers(target: Target, backend: str | Callable[..., object] = "inductor") -> None:
    """Layer by layer: all of them share one graph, compiled in seconds, and the hooks stay outside of it."""
    for layer in target.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)


def max_padded_tokens(config: Config) -> int:
    """The most tokens, padding included, of one forward."""
    return max(edge * rows_limit(edge, config.plan.token_budget) for edge in config.plan.bucket_edges)


def warm_up(forward: Forward, slab: Slab, config: Config, longest: int, device: torch.device) -> None:
    """Run every bucket that the data reaches, so that compilation and the allocator's peak come before the
    first lease: with one document, on a GPU with as many as the plan allows, and compiled with two as well:
    one is a compilation of its own, and so would be as many as the bucket is long.

    Raises:
        ModelError: a bucket does not fit into the GPU's memory.
    """
    budget = config.plan.token_budget
    for edge in config.plan.bucket_edges:
        most = rows_limit(edge, budget)
        counts = {1, min(2, most) if config.target.compile else 1, most if device.type == "cuda" else 1}
        for documents in sorted(counts):
            _warm(forward, slab, made_up(documents, edge, budget), budget)
        if edge >= longest:
            break


def _warm(forward: Forward, slab: Slab, batch: HostBatch, budget: int) -> None:
    bucket, documents = batch.padded_length, len(batch.documents)
    try:
        forward.run(batch, slab)
        slab.packed.wait()
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(
            f"bucket {bucket}: {documents} documents of it do not fit beside the model ({error}); "
            f"lower plan.token_budget = {budget} or the edges in plan.bucket_edges"
        ) from error
    seconds = slab.computed.seconds_since(slab.begun)
    log.info("warmed", extra={"bucket": bucket, "documents": documents, "forward_s": round(seconds, 3)})
