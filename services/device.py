"""The GPU of a role's thread."""

from __future__ import annotations

import torch

from protocol.errors import ConfigError


def use_device(device: torch.device) -> None:
    """Make a GPU this thread's own; nothing to do for a CPU. ConfigError: there is no such GPU here."""
    if device.type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(f"{device}: there is no such GPU here ({count} in all); name another, or cpu")
    torch.cuda.set_device(device)
