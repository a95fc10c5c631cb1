"""How much of a bare forward's speed a target server keeps: from lease to Ready, sockets and slots included.

    python benchmarks/target.py                       Qwen3-8B shape on a GPU, SmolLM2-135M shape on a CPU
    python benchmarks/target.py --out results.json    random weights; JSON also to a file

Both sides run the same batches through the same weights in the same process, in turns; the bare forward calls
the text tower in a loop (SDPA, no LM head, no cache, one synchronisation at the end). The server is the real
one, threads, arena and sockets included, under a scripted coordinator that keeps its slots full. It does not
run the layers behind the last tap, so its ratio may pass 1. Compare ratios, not tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from protocol.codec import decode, encode
from protocol.messages import (
    Assignment,
    BatchId,
    Exit,
    Message,
    Stamp,
    TargetHello,
    TargetOrders,
    TargetReport,
    Welcome,
)
from protocol.sockets import Router, new_context, router
from services.config.schema import Config
from services.data.batch import gather
from services.data.dataset import Dataset, Sample
from services.data.training_data import TrainingData
from services.data.writer import write_dataset
from services.dflash.drafter_config import derive
from services.dflash.target_model import Target, wrap_target
from services.lifecycle import arena_folder, hold_lock
from services.link import Link
from services.target.forward import compile_layers
from services.target.server import TargetServer
from services.target.start import Started, assemble, hello, open_slots

NAME = "target-bench"
NOBODY = "0" * 64  # a fingerprint that no coordinator checks


class Case(NamedTuple):
    """A model shape and the batches it is fed with."""

    model: PreTrainedConfig
    dtype: str
    rows: int  # samples of a batch
    edge: int  # tokens they are padded to
    batches: int  # of one round


def cases() -> dict[str, Case]:
    qwen3_8b = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    smollm2 = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    return {
        "qwen3-8b": Case(qwen3_8b, "bfloat16", rows=8, edge=1024, batches=24),
        "smollm2-135m": Case(smollm2, "float32", rows=2, edge=256, batches=6),
    }


class Script:
    """A coordinator that keeps every slot of one target in use, and forgets what is ready."""

    def __init__(self, control: Router, batches: list[tuple[int, ...]], slots: int) -> None:
        self._control, self._slots = control, slots
        self._waiting = {
            Stamp(1, n): Assignment(batch=BatchId(0, n), attempt=Stamp(1, n), samples=samples, publish=None)
            for n, samples in enumerate(batches)
        }
        self._peer, self._stamp = b"", 0
        self.ready_s: list[float] = []
        self.totals: dict[str, float] = {}

    def run(self) -> None:
        """Until every batch has been ready."""
        while self._waiting:
            self._peer, *frames = self._control.socket.recv_multipart()
            message = decode(frames)
            if isinstance(message, TargetHello):
                self._say(Welcome(incarnation=NAME, index=0))
                self._order()
            elif isinstance(message, TargetReport):
                self._follow(message)
        self._say(Exit(incarnation=NAME, finished=True, reason="done"))

    def _follow(self, report: TargetReport) -> None:
        self.totals = report.totals
        new = [s.attempt for s in report.slots if s.state == "ready" and s.attempt in self._waiting]
        assert not any(slot.state == "failed" for slot in report.slots), report.slots
        for attempt in new:
            del self._waiting[attempt]
            self.ready_s.append(time.perf_counter())
        if new:
            self._order()

    def _order(self) -> None:
        self._stamp += 1
        wanted = tuple(self._waiting.values())[: self._slots]
        self._say(TargetOrders(incarnation=NAME, stamp=Stamp(1, self._stamp), assignments=wanted))

    def _say(self, message: Message) -> None:
        self._control.socket.send_multipart([self._peer, *encode(message)])


def make_data(case: Case, folder: Path, *, ragged: bool) -> Dataset:
    random = np.random.default_rng(0)
    lowest = case.edge // 2 + 1 if ragged else case.edge
    lengths = random.integers(lowest, case.edge + 1, case.rows * case.batches)
    ids = [random.integers(0, case.model.vocab_size, length).astype(np.int32) for length in lengths]
    return write_dataset(folder, [Sample(row, np.ones(len(row), np.uint8)) for row in ids], {})


def make_config(case: Case, dataset: Dataset, folder: Path, arena: str) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": folder / "run"},
            "model": {"path": "random", "dtype": case.dtype},
            "data": {"path": dataset.path},
            "plan": {"token_budget": case.rows * case.edge, "bucket_edges": (case.edge,)},
            "drafter": {"mask_token_id": 5},
            "arena": {"dir": folder / "arena", "kind": arena},
            "profile": {"interval_s": 0.0},
        }
    )


def bare(target: Target, dataset: Dataset, batches: list[tuple[int, ...]], edge: int) -> float:
    """Real tokens a second of the text tower alone."""
    inputs, tokens = [], 0
    for samples in batches:
        batch = gather(dataset, samples, edges=(edge,), vocabulary=target.config.vocab_size)
        ids_BS = torch.zeros(len(samples), edge, dtype=torch.int64)
        batch.fill(ids_BS)
        inputs.append(ids_BS.to(target.device))
        tokens += batch.tokens
    with torch.inference_mode():
        target.base(input_ids=inputs[0], use_cache=False)
        wait(target.device)
        begun_s = time.perf_counter()
        for ids_BS in inputs:
            target.base(input_ids=ids_BS, use_cache=False)
        wait(target.device)
    return tokens / (time.perf_counter() - begun_s)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def assembled(config: Config, dataset: Dataset, target: Target) -> Iterator[Started]:
    started = assemble(config, TrainingData(dataset), target, derive(target.config, config.drafter, None))
    try:
        yield started
    finally:
        started.forward.close()


def served(
    config: Config, started: Started, batches: list[tuple[int, ...]]
) -> tuple[float, dict[str, float]]:
    """Real tokens a second from the first Ready to the last, and the target's own totals."""
    folder, context = arena_folder(config), new_context()
    lock = hold_lock(folder, NAME)
    with router(context, f"ipc://{folder / 'control'}") as control:
        writer = open_slots(config, started, folder, NAME)
        link = Link(control.endpoint, hello(writer, NAME, 0, NOBODY), heartbeat_s=1.0)
        server = TargetServer(config, NAME, started, writer, link, threading.Event())
        script = Script(control, batches, config.target.slots)
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(script.run)
            server.serve()
            outcome.result()
    lock.release(unlink=True)
    context.term()
    lengths = started.data.of(0).lengths
    tokens = int(sum(lengths[list(samples)].sum() for samples in batches[1:]))
    return tokens / (script.ready_s[-1] - script.ready_s[0]), script.totals


def measure(config: Config, dataset: Dataset, target: Target, case: Case, rounds: int) -> dict[str, Any]:
    """Bare and served in turns; medians of the rounds and of their ratios."""
    batches = [tuple(range(n * case.rows, (n + 1) * case.rows)) for n in range(case.batches)]
    alone, through, totals = [], [], {}
    with assembled(config, dataset, target):
        pass  # every shape warmed (and compiled) before anything is timed
    for _ in range(rounds):
        alone.append(bare(target, dataset, batches, case.edge))
        with assembled(config, dataset, target) as started:
            speed, totals = served(config, started, batches)
        through.append(speed)
    ratios = [served_ / bare_ for served_, bare_ in zip(through, alone, strict=True)]
    return {
        "bare_tokens_per_s": statistics.median(alone),
        "served_tokens_per_s": statistics.median(through),
        "served_to_bare": statistics.median(ratios),
        "rounds": {"bare": alone, "served": through},
        "totals_of_last_round": totals,
    }


def machine(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device)
        if on_gpu
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=sorted(cases()), default="qwen3-8b" if on_gpu else "smollm2-135m")
    parser.add_argument("--device", default="cuda:0" if on_gpu else "cpu")
    parser.add_argument("--arena", default="auto", choices=["auto", "shm", "pinned", "cuda_ipc"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ragged", action="store_true", help="lengths from half the bucket's edge to all of it"
    )
    parser.add_argument("--no-compile", action="store_true", help="measure the uncompiled forward only")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    case, device = cases()[options.shape], torch.device(options.device)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(case.model, dtype=getattr(torch, case.dtype))
    target = wrap_target(model)
    result: dict[str, Any] = {
        "benchmark": "target", "machine": machine(device), "shape": options.shape, "dtype": case.dtype,
        "arena": options.arena, "rows": case.rows, "edge": case.edge, "ragged": options.ragged,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="draftmill-", dir="/dev/shm") as name:
        folder = Path(name)
        dataset = make_data(case, folder / "set", ragged=options.ragged)
        config = make_config(case, dataset, folder, options.arena)
        result["uncompiled"] = measure(config, dataset, target, case, options.rounds)
        if not options.no_compile:
            compile_layers(target)
            result["compiled"] = measure(config, dataset, target, case, options.rounds)
            gain = result["compiled"]["served_tokens_per_s"] / result["uncompiled"]["bare_tokens_per_s"]
            result["compiled_served_to_uncompiled_bare"] = gain
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
