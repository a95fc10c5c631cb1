"""How fast a drafter trains on one pack: forward and backward, the whole step, the first step, memory.

    python benchmarks/drafter_step.py                          Qwen3-8B shape, every variant
    python benchmarks/drafter_step.py --variants four --out results.json
    python benchmarks/drafter_step.py --shape tiny             seconds; also on a CPU

Random weights and features; the code is the drafter role's own (`StepGradient`, `Weights`), without
sockets. Packs of a step follow each other as in training: the host waits once a step, so a pack's time
is the GPU's. During the timed packs a host synchronisation or a recompilation is an error.
First steps: `cold` in a process of its own with an empty compile cache, `warm` in this one, which finds it
filled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from protocol.messages import BatchId, StepTry
from services.config.schema import Config
from services.dflash.drafter import Drafter
from services.dflash.drafter_config import DrafterConfig
from services.dflash.head import FrozenHead
from services.drafter.metrics import Phases
from services.drafter.reduce import LocalReducer
from services.drafter.step import DTYPES, StepGradient
from services.drafter.weights import Weights

TRY = StepTry(0, 0, 1, 1)
PACKS, WARM_STEPS, STEPS = 4, 1, 6
GIB = 2**30
KINDS = (  # of kernels, by parts of their names; the first that fits
    ("attention", ("flex_attention",)),
    ("matrix products", ("gemm", "nvjet", "cutlass", "xmma")),
    ("compiled pieces", ("triton_",)),
)


class Variant(NamedTuple):
    """The documents of a pack, and what it is trained with."""

    lengths: tuple[int, ...]
    loss: str = "ce"
    dtype: str = "bfloat16"


VARIANTS = {
    "four": Variant((1000, 900, 1100, 1096)),
    "one": Variant((4096,)),
    "kl": Variant((1000, 900, 1100, 1096), loss="kl"),
    "long": Variant((32768,)),
}
SHAPES = {
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "num_hidden_layers": 5, "target_layer_ids": (1, 9, 17, 25, 33),
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 1000, "num_hidden_layers": 2, "target_layer_ids": (1, 9),
    },
}  # fmt: skip


def shape_of(name: str) -> DrafterConfig:
    sizes = SHAPES[name]
    return DrafterConfig(
        **sizes, num_target_layers=36, block_size=16, mask_token_id=sizes["vocab_size"] - 1,
        rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960,
        layer_types=("full_attention",) * sizes["num_hidden_layers"],
    )  # fmt: skip


class Case:
    """One drafter with its target's two ends on `device`, and a pack for it."""

    def __init__(self, shape: DrafterConfig, variant: Variant, device: torch.device, anchors: int) -> None:
        self.shape, self.variant, self.device = shape, variant, device
        config = Config.model_validate({
            "model": {"path": "none"}, "data": {"path": "none"}, "plan": {"packs_per_step": PACKS},
            "drafter": {"dtype": variant.dtype},
            "recipe": {"anchors_per_pack": anchors, "loss": variant.loss},
        })  # fmt: skip
        drafter = Drafter(shape, seed=None)
        self.weights = Weights(drafter, config.recipe, device)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        embedding, head = (self._rows(shape.vocab_size, shape.hidden_size) * 0.02 for _ in range(2))
        self.step = StepGradient(
            config, drafter, self.weights, embedding, FrozenHead(head),
            total_steps=1000, phases=Phases(device),
        )  # fmt: skip
        self.pack = self.draw_pack()
        self.steps_done = 0

    def _rows(self, rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, dtype=DTYPES[self.variant.dtype], device=self.device)

    def draw_pack(self) -> dict[str, torch.Tensor]:
        lengths = self.variant.lengths
        tokens = sum(lengths)
        plain = {
            "input_ids": torch.randint(0, self.shape.vocab_size - 1, (tokens,), dtype=torch.int32),
            "loss_mask": torch.ones(tokens, dtype=torch.uint8),
            "position_ids": torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
            "document_offsets": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32),
        }
        on_device = {name: tensor.to(self.device) for name, tensor in plain.items()}
        pack = {"features": self._rows(tokens, self.shape.feature_size)} | on_device
        if self.variant.loss == "kl":
            pack["last_hidden"] = self._rows(tokens, self.shape.hidden_size)
        return pack

    def add_packs(self, count: int = PACKS) -> None:
        for position in range(count):
            self.step.add(position, BatchId(0, PACKS * self.steps_done + position), self.pack)

    def finish_step(self) -> dict[str, float]:
        figures = self.step.apply(self.steps_done, self.step.seal(LocalReducer(), TRY))
        self.steps_done += 1
        return figures

    def whole_step(self) -> dict[str, float]:
        self.add_packs()
        return self.finish_step()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def nothing_waits_or_compiles(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def first_step_s(case: Case) -> float:
    """Forward and backward of the first pack, compiling included."""
    wait(case.device)
    begun_s = time.perf_counter()
    case.add_packs(1)
    wait(case.device)
    return time.perf_counter() - begun_s


def measure(case: Case) -> dict[str, Any]:
    """Medians over steps; `pack_ms` is a step's forward and backward divided by its packs, `host_ms` the
    host's part of it, until it has nothing more to say."""
    for _ in range(WARM_STEPS):
        case.whole_step()
    if case.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(case.device)
    packs_ms, steps_ms, host_ms = [], [], []
    for _ in range(STEPS):
        wait(case.device)
        begun_s = time.perf_counter()
        with nothing_waits_or_compiles(case.device):
            case.add_packs()
        host_ms.append((time.perf_counter() - begun_s) * 1e3 / PACKS)
        wait(case.device)
        middle_s = time.perf_counter()
        case.finish_step()
        wait(case.device)
        packs_ms.append((middle_s - begun_s) * 1e3 / PACKS)
        steps_ms.append((time.perf_counter() - begun_s) * 1e3)
    pack_ms = statistics.median(packs_ms)
    tokens = sum(case.variant.lengths)
    return {
        "pack_ms": pack_ms,
        "context_tokens_per_s": tokens / pack_ms * 1e3,
        "step_ms": statistics.median(steps_ms),
        "step_to_packs": statistics.median(
            step / (PACKS * pack) for step, pack in zip(steps_ms, packs_ms, strict=True)
        ),
        "host_ms": statistics.median(host_ms),
        "rounds_pack_ms": packs_ms,
        **memory(case),
        **kernel_ms(case),
    }


def memory(case: Case) -> dict[str, float]:
    """What stays (weights, gradient, moments, copies, the target's ends, the pack) and what a pack adds."""
    if case.device.type != "cuda":
        return {}
    peak, lasting = torch.cuda.max_memory_allocated(case.device), torch.cuda.memory_allocated(case.device)
    moments = 2 * 4 * case.weights.masters.numel()
    return {
        "peak_gib": peak / GIB,
        "peak_without_moments_gib": (peak - moments) / GIB,
        "lasting_gib": lasting / GIB,
        "peak_above_lasting_gib": (peak - lasting) / GIB,
    }


def kernel_ms(case: Case) -> dict[str, Any]:
    """GPU time of a pack by kind of kernel, and the longest ones; means over a step's packs."""
    if case.device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        case.add_packs()
        wait(case.device)
    case.step.clear()
    by_kind = dict.fromkeys([*(kind for kind, _ in KINDS), "others"], 0.0)
    times = {event.key: event.self_device_time_total / 1e3 / PACKS for event in profile.key_averages()}
    counts = {event.key: event.count for event in profile.key_averages()}
    for name, time_ms in times.items():
        kind = next((kind for kind, parts in KINDS if any(part in name for part in parts)), "others")
        by_kind[kind] += time_ms
    longest = sorted(times, key=lambda name: -times[name])[:30]
    return {
        "kernel_ms": sum(times.values()),
        "kernel_ms_by_kind": by_kind,
        "longest_kernels_ms": {f"{counts[name] / PACKS:g} x {name[:90]}": times[name] for name in longest},
    }


def machine(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip
    if on_gpu:
        import triton

        facts["triton"] = triton.__version__
    return facts


def cold_first_step_s(options: argparse.Namespace) -> float:
    """The first step of a fresh process, which fills the compile cache that this process was told to use."""
    arguments = ["--shape", options.shape, "--variants", options.variants[0], "--first-step"]
    arguments += ["--device", options.device, "--anchors", str(options.anchors)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b" if on_gpu else "tiny")
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--device", default="cuda:0" if on_gpu else "cpu")
    parser.add_argument("--anchors", type=int, default=512 if on_gpu else 32)
    parser.add_argument("--no-cold", action="store_true", help="leave the compile cache alone")
    parser.add_argument("--first-step", action="store_true", help="print the first step's seconds and end")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    shape, device = shape_of(options.shape), torch.device(options.device)
    if options.first_step:
        print(first_step_s(Case(shape, VARIANTS[options.variants[0]], device, options.anchors)))
        return
    result: dict[str, Any] = {
        "benchmark": "drafter_step", "machine": machine(device), "shape": options.shape,
        "anchors": options.anchors, "block_size": shape.block_size, "packs_per_step": PACKS,
        "parameters": shape.parameter_count,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="draftmill-cache-") as cache:
        if not options.no_cold:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            result["cold_first_step_s"] = cold_first_step_s(options)
        for name in options.variants:
            case = Case(shape, VARIANTS[name], device, options.anchors)
            figures = VARIANTS[name]._asdict() | {"first_step_s": first_step_s(case)}
            case.step.clear()
            result[name] = figures | measure(case)
            del case
            write(result, options.out)


def write(result: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(result, indent=1)
    if out:
        out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
