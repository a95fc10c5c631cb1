"""A drafter that only looks: python target_peer.py FOLDER DEVICE

Reads the hex of a Pack message a line, opens and verifies it, prints the digest of its features.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from protocol.codec import decode
from protocol.messages import Pack
from services.transport.reader import SlotReader

ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """128 bits of the bits of all features, split or joined, row by row; the same on any device.

    Each word is mixed, one to one, with its place before the sums, so that nothing cancels. On a GPU it
    costs a fraction of a millisecond: a slower look would let the target wait instead of overlap.
    """
    names = sorted((n for n in tensors if n.startswith("features")), key=lambda n: (len(n), n))
    joined_TF = torch.cat([tensors[name] for name in names], dim=-1).contiguous()
    words_W = joined_TF.view(torch.int64).flatten()
    places_W = torch.arange(words_W.numel(), device=words_W.device)
    mixed_W = (words_W ^ (places_W * ODD[0])) * ODD[1]
    mixed_W = (mixed_W ^ ((mixed_W >> 29) & ((1 << 35) - 1))) * ODD[2]
    sums = torch.stack([mixed_W.sum(), (mixed_W * (2 * places_W + 1)).sum()])
    return "-".join(f"{value & (2**64 - 1):016x}" for value in sums.tolist())


def main(folder: Path, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    reader = SlotReader(folder, device)
    for line in sys.stdin:
        message = decode([b"Pack", bytes.fromhex(line)])
        assert isinstance(message, Pack)
        reader.keep((message.descriptor.arena,))
        pack = reader.open(message.descriptor)
        pack.wait()
        found = digest(pack)
        pack.verify()
        sys.stdout.write(found + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]))
