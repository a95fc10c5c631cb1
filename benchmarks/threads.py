"""The pipeline as one process with threads and queues, which the services replaced: 1 target, 1 drafter.

    python benchmarks/threads.py --shape qwen3-8b --target.compile --against pipeline.json
    python benchmarks/threads.py --shape tiny --window 5               on a CPU, to try the script

    thread target    gather -> ids to its GPU -> forward with `output_hidden_states` -> taps joined
       queue of 1 pack on the GPU
    thread copier    waits for the forward -> copy into pinned memory on a stream of its own -> waits for it
       queue of target.slots packs in pinned memory
    thread drafter   copy to its GPU on a stream of its own -> waits for it -> forward, backward;
                     after plan.packs_per_step packs: clip, AdamW

Model, batches, compilation and every line of the drafter's step are those of benchmarks/pipeline.py; only
what lies between the stages differs. It is written as well as threads allow: buffers are reused, copies
are pinned and overlap with both forwards, the drafter waits for its GPU once a step. What stays is the
design: one interpreter for all launches, hosts that wait for copies, and Transformers' own capture of all
hidden states, whose forward asks the GPU a question a batch. `against` is the pipeline's rate over this one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from pipeline import folder_in, machine, options_of, parse, part, publish, run_flags
from stages.shapes import shapes, write_inputs
from stages.threaded import SETTLING, Threads

from services.config.environment import keep_compiled
from services.config.load import load
from services.config.sources import split_flags
from services.lifecycle import ExitCode, leave

END_S = 6.0  # of --limit, for what comes after the window


def main() -> None:
    begun_s = time.perf_counter()
    parser = options_of(__doc__, limit_s=120.0)
    parser.add_argument("--packs", type=int, default=64, help="different ones, over and over")
    parser.add_argument("--against", type=Path, help="JSON of benchmarks/pipeline.py with the same options")
    options, flags = parse(parser)
    result: dict[str, Any] = {
        "benchmark": "threads", "machine": machine(), "shape": options.shape, "flags": flags, "failed": [],
    }  # fmt: skip
    with part(result, "threads"), folder_in(options.memory) as folder:
        result |= measure(folder, options, dict(flags), begun_s + options.limit - END_S)
    if options.against:
        with part(result, "against"):
            result["against"] = against(result, json.loads(options.against.read_text()))
    result["wall_s"] = round(time.perf_counter() - begun_s, 1)
    publish(result, options.out)
    leave(ExitCode.UNEXPECTED if result["failed"] else ExitCode.FINISHED)  # whatever the threads still do


def measure(
    folder: Path, options: argparse.Namespace, given: dict[str, str], until_s: float
) -> dict[str, Any]:
    shape = shapes()[options.shape]
    words = run_flags(shape, folder, options.cache or folder / "compiled", given)
    config = load(None, split_flags(words)[0]).config
    keep_compiled(config.run.compile_cache)
    write_inputs(shape, folder, options.packs * (config.plan.token_budget // shape.tokens))
    threads = Threads(config)
    threads.observe(options.window, until_s)
    return figures(threads)


def figures(threads: Threads) -> dict[str, Any]:
    """RuntimeError: a thread failed, or there was no step in the window."""
    if threads.failure:
        raise RuntimeError(threads.failure)
    commits = threads.commits[SETTLING:]
    if len(commits) < 2:
        raise RuntimeError(f"no steady state in time: {len(threads.commits)} steps")
    seconds = commits[-1][0] - commits[0][0]
    tokens = sum(tokens for _, tokens in commits[1:])
    return {
        "compiled": threads.config.target.compile,
        "steps": len(commits) - 1,
        "window_s": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "waited_share": {why: round(s / seconds, 4) for why, s in sorted(threads.waited_s.items())},
    }


def against(result: dict[str, Any], pipeline: dict[str, Any]) -> dict[str, Any]:
    """The pipeline's rate over this one; ValueError if it measured something else."""
    if (pipeline["shape"], pipeline["flags"]) != (result["shape"], [list(flag) for flag in result["flags"]]):
        raise ValueError(f"it is of {pipeline['shape']} with {pipeline['flags']}")
    rate = pipeline["pipeline"]["committed_tokens_per_s"]
    return {"pipeline_tokens_per_s": rate, "ratio": round(rate / result["tokens_per_s"], 4)}


if __name__ == "__main__":
    main()
