"""A drafter that only looks: python target_peer.py FOLDER DEVICE

Reads the hex of a Pack message a line, opens and verifies it, prints the sha256 of its features.
"""

import hashlib
import sys
from pathlib import Path

import torch
from torch import Tensor

from protocol.codec import decode
from protocol.messages import Pack
from services.transport.reader import SlotReader


def digest(tensors: dict[str, Tensor]) -> str:
    """Of the bits of all features, split or joined, row by row."""
    names = sorted((n for n in tensors if n.startswith("features")), key=lambda n: (len(n), n))
    joined_TF = torch.cat([tensors[name].cpu() for name in names], dim=-1).contiguous()
    return hashlib.sha256(joined_TF.view(torch.uint8).numpy().data).hexdigest()


def main(folder: Path, device: torch.device) -> None:
    reader = SlotReader(folder, device)
    for line in sys.stdin:
        message = decode([b"Pack", bytes.fromhex(line)])
        assert isinstance(message, Pack)
        pack = reader.open(message.descriptor)
        pack.wait()
        found = digest(dict(pack))
        pack.verify()
        sys.stdout.write(found + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]))
