"""Is this export what a server will run? Reloaded here and by z-lab's own class, hidden states compared.

z-lab's package is used when it is installed (`pip install --no-deps dflash`); the reload by our own
strict reader always happens. Float32 on the CPU, a second or two for a drafter of a billion weights.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protocol.errors import CheckpointError
from services.dflash.attention import ServingAttention
from services.dflash.drafter import Drafter
from services.dflash.export import load_zlab
from services.dflash.target_model import torch_dtype

TOLERANCE = 1e-4
_CONTEXT_TOKENS = 37


def check_export(out: Path, drafter: Drafter, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """Compares the folder with the drafter it was made from; raises `CheckpointError`.

    Returns `tensors`, `zlab` (whether its class could be asked), and `hidden_error`, the largest
    absolute difference of normed hidden rows between its class and ours (None if not asked).
    """
    loaded = load_zlab(out)
    if loaded.config != drafter.config:
        raise CheckpointError(
            f"export {out}: its configuration reads back as {loaded.config}, not {drafter.config}"
        )
    written = drafter.state_dict()
    for name, tensor in loaded.state_dict().items():
        if not torch.equal(tensor, written[name].detach().to("cpu", torch_dtype(dtype)).float()):
            raise CheckpointError(f"export {out}: {name} does not read back as it was written")
    error = _zlab_error(out, loaded) if zlab_installed() else None
    return {"tensors": len(written), "zlab": error is not None, "hidden_error": error}


def zlab_installed() -> bool:
    return importlib.util.find_spec("dflash") is not None


def load_with_zlab(out: Path) -> Any:
    """z-lab's `DFlashDraftModel` in float32, every key of the export consumed. Raises `CheckpointError`."""
    draft_class: Any = importlib.import_module("dflash.model").DFlashDraftModel
    model, report = draft_class.from_pretrained(str(out), dtype=torch.float32, output_loading_info=True)
    left = {
        kind: sorted(report[kind])
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if report[kind]
    }
    if left:
        raise CheckpointError(f"export {out}: z-lab's class loads it with {left}; nothing may be left over")
    return model.eval()


@torch.inference_mode()
def _zlab_error(out: Path, drafter: Drafter) -> float:
    config, theirs = drafter.config, load_with_zlab(out)
    if tuple(theirs.target_layer_ids) != config.target_layer_ids or theirs.block_size != config.block_size:
        raise CheckpointError(
            f"export {out}: z-lab's reads taps {theirs.target_layer_ids}, blocks of {theirs.block_size}"
        )
    generator = torch.Generator().manual_seed(0)
    features_TF = torch.randn(_CONTEXT_TOKENS, config.feature_size, generator=generator)
    inputs_RH = torch.randn(config.block_size, config.hidden_size, generator=generator)
    expected = theirs(
        target_hidden=features_TF[None],
        noise_embedding=inputs_RH[None],
        position_ids=torch.arange(_CONTEXT_TOKENS + config.block_size)[None],
    )[0]
    error = float((block_hidden(drafter, features_TF, inputs_RH) - expected).abs().max())
    if not error <= TOLERANCE:
        raise CheckpointError(
            f"export {out}: hidden states differ from z-lab's class by {error:.2e}, more than {TOLERANCE:.0e}"
        )
    return error


def block_hidden(drafter: Drafter, features_TF: Tensor, inputs_RH: Tensor) -> Tensor:
    """Hidden rows [B, H] of one block right behind its whole context, as a server computes them."""
    tokens, size = features_TF.shape[0], inputs_RH.shape[0]
    context = drafter.context_key_values(drafter.context(features_TF), torch.arange(tokens))
    attend = ServingAttention(drafter.config, tokens, size, inputs_RH.device)
    return drafter(inputs_RH, torch.arange(tokens, tokens + size), context, attend)
