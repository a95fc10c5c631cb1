"""The whole pipeline against its slower stage run alone, in one run: 1 target + 1 drafter, random weights.

    python benchmarks/pipeline.py --shape qwen3-8b --target.compile     target on GPU 0, drafter on GPU 1
    python benchmarks/pipeline.py --shape qwen3.6-27b --window 15       its hybrid text tower, uncompiled
    python benchmarks/pipeline.py --shape tiny --window 5               on a CPU, to try the script

    alone      the target from lease to Ready, then the drafter's step, each in a process of its own, with the
               pipeline's options, batches and compiled kernels (benchmarks/stages/alone.py)
    pipeline   the real services under `draftmill up`, observed in their steady state, then killed
    memory     what each role and the arenas take, against `draftmill plan` and `check`

Model and dataset are written into memory (5 GB for Qwen3-8B's shape); a target's weights are made on its
device and never read, all else is as in a run (benchmarks/stages/shapes.py, roles.py). Options of the schema
go to every part. What fails is named in the JSON, which is printed in any case, and makes the exit code 1.
Nothing is waited for after --limit seconds but the processes that are killed then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from stages.alone import Alone
from stages.footprint import compare
from stages.running import Observed, Running, figures
from stages.shapes import Shape, shapes, write_inputs

from services.config.load import Loaded, load
from services.config.sources import split_flags

ROOT = Path(__file__).parents[1]
BAR = 0.95
END_S = 12.0  # of --limit, for what comes after the window
ALONE_SHARE = 0.6  # of --limit, until the stages alone must be ready


def main() -> None:
    parser = options_of(__doc__, limit_s=150.0)
    parser.add_argument("--steps", type=int, default=600, help="of the run that is planned: never reached")
    parser.add_argument("--no-alone", action="store_true", help="measure the pipeline only")
    options, flags = parse(parser)
    begun_s = time.perf_counter()
    shape = shapes()[options.shape]
    result: dict[str, Any] = {
        "benchmark": "pipeline", "shape": options.shape, "flags": flags, "failed": [],
    }  # fmt: skip
    try:
        with part(result, "preparations"), folder_in(options.memory) as folder:
            measure(result, shape, folder, options, flags, begun_s)
    except BaseException as error:
        result["failed"].append(f"cut short: {type(error).__name__}")
        raise
    finally:
        result["wall_s"] = round(time.perf_counter() - begun_s, 1)
        result["machine"] = machine()  # last: this process has no part in the memory that is measured
        publish(result, options.out)
    sys.exit(1 if result["failed"] else 0)


def options_of(description: str | None, *, limit_s: float) -> argparse.ArgumentParser:
    """What this benchmark and benchmarks/threads.py have in common."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(shapes()), default="tiny")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of steady state")
    parser.add_argument("--limit", type=float, default=limit_s, help="seconds for everything")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="where model and data go")
    parser.add_argument("--cache", type=Path, help="compiled kernels to start from; none: a new folder")
    parser.add_argument("--out", type=Path)
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[tuple[str, str]]]:
    """Options and flags of the schema. From now on SIGTERM ends children, folders and JSON in order."""
    flags, words = split_flags(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return parser.parse_args(words), flags


@contextmanager
def folder_in(memory: Path) -> Iterator[Path]:
    """Gigabytes, which are given back."""
    with tempfile.TemporaryDirectory(prefix="draftmill-", dir=memory, ignore_cleanup_errors=True) as name:
        yield Path(name)


def publish(result: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(result, indent=1)
    print(text, flush=True)
    if out:
        out.write_text(text + "\n", encoding="utf-8")


def measure(
    result: dict[str, Any], shape: Shape, folder: Path, options: argparse.Namespace,
    flags: list[tuple[str, str]], begun_s: float,
) -> None:  # fmt: skip
    words = run_flags(shape, folder, options.cache or folder / "compiled", dict(flags))
    loaded = load(None, split_flags(words)[0])
    config = loaded.config
    packs = options.steps * config.plan.packs_per_step
    write_inputs(shape, folder, packs * (config.plan.token_budget // shape.tokens))
    note(result, "inputs_s", begun_s)
    until_s = begun_s + options.limit - END_S
    if not options.no_alone:
        ready_until_s = begun_s + ALONE_SHARE * options.limit
        measure_alone(result, words, folder, shape.batches, ready_until_s, until_s)
        note(result, "alone_s", begun_s)
    with part(result, "pipeline"):
        with Running(config, words, environment()) as running:
            observed = running.observe(options.window, until_s)
        result["pipeline"] = figures(observed)
        result["against_slower_stage"] = against(result)
        with part(result, "memory"):
            result["memory"] = memory(loaded, observed)


def run_flags(shape: Shape, folder: Path, cache: Path, given: dict[str, str]) -> list[str]:
    """The run's options, each once: those given win."""
    dtype = str(shape.dtype).removeprefix("torch.")
    options = shape.options | {
        "run.dir": str(folder / "run"), "model.path": str(folder / "model"),
        "data.path": str(folder / "data"), "arena.dir": str(folder / "arena"),
        "run.compile-cache": str(cache), "model.dtype": dtype, "drafter.dtype": dtype,
        "coordinator.http-port": "0", "checkpoint.every-steps": "1000000", "target.self-check": "false",
        "profile.interval-s": "10",
    }  # fmt: skip
    flags = {f"--{name}": value for name, value in options.items()}
    return [f"{name}={value}" for name, value in (flags | given).items()]


def environment() -> dict[str, str]:
    """Children find the project and this folder wherever they start."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def measure_alone(
    result: dict[str, Any], words: list[str], folder: Path, packs: int, ready_until_s: float, until_s: float
) -> None:
    """Both are prepared side by side until `ready_until_s`, then measured one after the other."""
    apart = [*(word for word in words if not word.startswith("--run.dir=")), f"--run.dir={folder / 'alone'}"]
    found, ready = result.setdefault("alone", {}), []
    with contextlib.ExitStack() as stack:
        stages = []
        for name in ("target", "drafter"):
            stages.append(Alone(name, [str(packs), *apart], environment(), ready_until_s))
            stack.callback(stages[-1].close)
        for stage in stages:
            with part(result, f"{stage.name} alone"):
                stage.ready()
                ready.append(stage)
        for stage in ready:
            with part(result, f"{stage.name} alone"):
                found[stage.name] = stage.measure(until_s)


def against(result: dict[str, Any]) -> dict[str, Any]:
    alone = result.get("alone", {})
    if set(alone) != {"target", "drafter"}:
        return {}
    slower = min(alone, key=lambda name: alone[name]["tokens_per_s"])
    ratio = result["pipeline"]["committed_tokens_per_s"] / alone[slower]["tokens_per_s"]
    return {"slower": slower, "ratio": round(ratio, 4), "bar": BAR, "met": ratio >= BAR}


def memory(loaded: Loaded, observed: Observed) -> dict[str, Any]:
    assert observed.footprint is not None, "the run had ended"
    totals = {role["role"]: role["totals"] for role in observed.statuses[-1].status["roles"]}
    return compare(loaded, observed.footprint, totals)


@contextmanager
def part(result: dict[str, Any], name: str) -> Iterator[None]:
    """What goes wrong inside is noted, and the other parts go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - results of the other parts must not be lost
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        result["failed"].append(f"{name}: {type(error).__name__}: {first}")


def note(result: dict[str, Any], name: str, begun_s: float) -> None:
    result.setdefault("elapsed", {})[name] = round(time.perf_counter() - begun_s, 1)


def machine() -> dict[str, Any]:
    count = torch.cuda.device_count()
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)], "cores": os.cpu_count(),
        "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
