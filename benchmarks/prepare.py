"""What `draftmill prepare` and the plan cost at a million samples: JSON with rates and memory.

    python benchmarks/prepare.py [--rows N] [--workers N] [--out FILE]

prepare   N chats of 20 to 120 tokens, one question and one answer each, with a tiny byte-level tokenizer
          (a real one is as fast: the library's cost is per token). The process is killed with SIGKILL at
          two fifths and started again, so the time includes what is done twice, and every row is checked
          to be there once, in order. `private_bytes` is anonymous memory, after a tenth and at the end: it
          must not grow with the input. CPU seconds are of the resumed part alone.
plan      CPU time of one epoch of N lengths, log-normal with a median of 490 tokens, 16 to 3,072.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from services.config.schema import Data, Plan
from services.data.dataset import Dataset
from services.data.plan import epoch_plan, padded_length
from services.data.prepare import Progress, prepare

TEXT = (
    "the quick brown fox jumps over a lazy dog while seven wizards quietly mix strange potions in tall glass "
    "jars, because nobody told them that history, physics and music were closed today?"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path) -> None:
    """A tokenizer with a chat template and a configuration of 1,024 embedding rows."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([TEXT] * 9, trainer)
    raw.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=1024).save_pretrained(folder)


def write_chats(path: Path, rows: int) -> None:
    rng, words = random.Random(0), TEXT.split()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            said = [" ".join(rng.choices(words, k=rng.randint(4, 40))) for _ in range(2)]
            messages = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
            file.write(json.dumps({"messages": messages}) + "\n")


def private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))


def run_prepare(folder: Path, workers: int, kill_at: float, results: Connection) -> None:
    """In a child: prepare, and die at `kill_at` of the input, or send figures at the end."""
    seen: dict[str, float] = {}

    def watch(progress: Progress) -> None:
        if "first" not in seen:
            seen.update(first=progress.share, written=progress.written, cpu=time.process_time())
        if "early" not in seen and progress.share > seen["first"] + 0.1:
            seen["early"] = private_bytes()
        if progress.share >= kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    options = Data(path=folder / "out", workers=workers)
    info = prepare([folder / "in.jsonl"], folder / "out", str(folder / "model"), options, watch)
    rows = info["statistics"]["rows"]
    results.send({
        "resumed_at": seen["first"], "rows": rows, "tokens": info["statistics"]["tokens"],
        "rows_per_cpu_s": (rows - seen["written"]) / (time.process_time() - seen["cpu"]),
        "private_bytes": [seen["early"], private_bytes()],
    })  # fmt: skip


def measure_prepare(rows: int, workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        write_chats(folder / "in.jsonl", rows)
        spawn = multiprocessing.get_context("spawn")
        started = time.perf_counter()
        for kill_at in (0.4, 2.0):
            ours, theirs = spawn.Pipe()
            child = spawn.Process(target=run_prepare, args=(folder, workers, kill_at, theirs))
            child.start()
            theirs.close()
            child.join()
        wall_s = time.perf_counter() - started
        dataset = Dataset.open(folder / "out")
        lines = np.concatenate([block.source_line for block in dataset.blocks()])
        assert np.array_equal(lines, np.arange(1, rows + 1)), "a row is lost, doubled or out of place"
        figures: dict[str, Any] = ours.recv()
        size = (folder / "in.jsonl").stat().st_size
        return {**figures, "input_bytes": size, "workers": workers, "rows_per_s": rows / wall_s}


def measure_plan(rows: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(6.2, 0.8, rows)), 16, 3072).astype(np.int32)
    edges = Plan().bucket_edges
    figures = []
    for budget in (4096, 16384):
        started = time.process_time()
        plan = epoch_plan(
            seed=0, epoch=0, fingerprint="f", lengths=lengths, bucket_edges=edges, token_budget=budget
        )
        seconds = time.process_time() - started
        padded = sum(padded_length(length, edges) for length in lengths.tolist())
        figures.append({
            "token_budget": budget, "cpu_s": seconds, "batches": len(plan.batches),
            "full": float(lengths.sum() / (len(plan.batches) * budget)),
            "padding_share": float(1 - lengths.sum() / padded),
        })  # fmt: skip
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    result = {
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "plan": measure_plan(options.rows),
        "prepare": measure_prepare(options.rows, options.workers),
    }
    text = json.dumps(result, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
