"""`draftmill`: one entry a command. Options are read here, heavy things are imported inside the entries.

Every command that has to do with a run or a dataset takes `--config FILE` and any `--section.option VALUE` of
the schema (docs/options.md). What
ends a command on purpose is printed as one block, without a traceback, and decides its exit code
(services/lifecycle.py has the table).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from protocol.errors import ConfigError, DraftmillError
from services import logging as events
from services.cli_eval import device_named, evaluate
from services.cli_models import models
from services.cli_runs import ConfigFile, runs
from services.config.environment import keep_compiled
from services.config.load import Loaded, load, refuse
from services.config.names import OPTIONS
from services.config.schema import Config
from services.config.sources import split_flags
from services.lifecycle import (
    ExitCode,
    exit_code,
    exit_on_thread_failure,
    leave,
    leave_or_rest,
    new_incarnation,
    unforeseen,
)
from services.models.hub import load_local
from services.place import claim_place

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_WITHOUT_OPTIONS = {"convert", "export", "inspect", "keys", "metrics"}

Inputs = Annotated[list[Path], typer.Argument(help="JSONL, Parquet or dataset folders")]
Index = Annotated[int | None, typer.Option(min=0, help="place in the run; none: the lowest free one")]
Rate = Annotated[
    float | None, typer.Option(min=0.0, help="tok/s of one that never waits; none: of the running run")
]


def main() -> None:
    """Entry point: takes the schema's flags out of the command line, then runs the command."""
    flags, words = split_flags(sys.argv[1:])
    for hint in _hints(words):
        typer.echo(hint, err=True)
    try:
        app(words, obj=flags, prog_name="draftmill")
    except DraftmillError as error:
        code = exit_code(error)
        with suppress(OSError, SystemExit):  # the code tells, even if nobody reads what is printed
            console = Console(stderr=True, soft_wrap=True, highlight=False)
            console.print(f"{type(error).__name__}: {error}", markup=False)
            console.print(f"exit {code.value} ({code.name.lower().replace('_', ' ')})", style="dim")
        leave(code)
    except PermissionError as error:
        rule = f"user {os.geteuid()} may not read or write it"
        with suppress(OSError):
            typer.echo(
                f"{error.filename}: {rule}; in containers: MODELS, DATA, RUNS and USER_ID of .env", err=True
            )
        leave(ExitCode.CONFIGURATION)
    except Exception as error:  # noqa: BLE001 - the process ends here, at once: a role that fails frees its lock
        with suppress(OSError):
            traceback.print_exc()
        leave(unforeseen(error))


@app.callback()
def common(context: typer.Context) -> None:
    """Train DFlash drafters with processes that may each crash and come back alone."""
    if context.invoked_subcommand in _WITHOUT_OPTIONS and context.obj:
        flag, value = context.obj[0]
        raise ConfigError(
            f"{flag} {value}: `draftmill {context.invoked_subcommand}` takes no options of the schema"
        )


@app.command()
def prepare(context: typer.Context, inputs: Inputs, config: ConfigFile = None) -> None:
    """Chats or tokenized completions become the dataset at data.path."""
    options = load_local(config, context.obj).config
    from services.data.prepare import prepare as convert
    from services.data.writer import SKIPPED

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("preparing", total=1.0)
        info = convert(
            inputs,
            options.data.path,
            options.model.path,
            options.data,
            lambda done: bar.update(task, completed=done.share, description=f"{done.written} samples"),
        )
    typer.echo(json.dumps(info, indent=1, ensure_ascii=False))
    if info["skipped"]:
        count = sum(info["skipped"].values())
        left_out = (
            f"{count} rows left out, with their reasons" if count > 1 else "1 row left out, with the reason"
        )
        typer.echo(f"{left_out}: {options.data.path / SKIPPED}", err=True)


@app.command()
def inspect(
    data: Annotated[Path, typer.Argument(help="a prepared dataset")],
    row: Annotated[int | None, typer.Argument(help="a sample; none: statistics and warnings", min=0)] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="model to compare with; none: the one it was prepared for")
    ] = None,
) -> None:
    """Show a prepared dataset, or one of its samples with the supervised tokens marked."""
    from services.data.inspect import inspect as show

    show(data, row, tokenizer, Console())


@app.command()
def regenerate(
    context: typer.Context,
    inputs: Inputs,
    out: Annotated[Path, typer.Option(help="JSONL of answers; what is there is not asked again")],
    config: ConfigFile = None,
    server: Annotated[
        str, typer.Option(help="OpenAI-compatible, up to /v1; none: load the target here")
    ] = "",
    served_as: Annotated[str, typer.Option(help="the server's name of the model; none: model.path")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="file with the server's key")] = None,
    concurrency: Annotated[int, typer.Option(help="requests to the server at a time", min=1)] = 64,
    device: Annotated[str, typer.Option(help="where the target is loaded; none: a GPU if there is one")] = "",
    batch_tokens: Annotated[int, typer.Option(help="prompt and answer tokens of a batch", min=1)] = 16384,
    answers: Annotated[int, typer.Option(help="answers to each prompt", min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="limit of an answer", min=1)] = 2048,
    temperature: Annotated[float, typer.Option(help="0: greedy", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="1: all tokens", min=0.0, max=1.0)] = 1.0,
) -> None:
    """Prompts become the target's own answers, in the mode that data.thinking says will be served."""
    if not temperature and top_p != 1.0:
        raise ConfigError(f"--top-p {top_p:g}: greedy answers take the best token; give a --temperature too")
    options = load(config, context.obj, needs=["model.path"]).config
    from services.data.answers_server import ServerAnswers
    from services.data.regenerate import Answerer, Ask, WhenAsked
    from services.data.regenerate import regenerate as ask_for

    ask = Ask(
        served_as or options.model.path, answers, max_new_tokens, temperature, top_p, options.run.seed,
        thinking=options.data.thinking == "train",
    )  # fmt: skip
    answerer: Answerer
    if server:
        key = api_key_file.read_text(encoding="utf-8").strip() if api_key_file else ""
        answerer = ServerAnswers(server, ask, concurrency=concurrency, api_key=key)
    else:
        from services.data.answers_local import local_answers

        options = load_local(config, context.obj, needs=["model.path"]).config
        where = device_named(device)
        answerer = WhenAsked(lambda: local_answers(options, ask, device=where, batch_tokens=batch_tokens))
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("answering", total=None)
        summary = ask_for(
            inputs, out, answerer, ask, on_bad_line=options.data.on_bad_line,
            on_progress=lambda done, wanted: bar.update(task, completed=done, total=wanted),
        )  # fmt: skip
    typer.echo(json.dumps(summary._asdict(), indent=1))


@app.command()
def up(context: typer.Context, config: ConfigFile = None) -> None:
    """Run coordinator, targets and drafters on this machine until the run is finished."""
    loaded = load(config, context.obj)
    words = [
        *(["--config", str(config)] if config else []),
        *(f"{flag}={value}" for flag, value in context.obj),
    ]
    # in a process of its own: it loads transformers, and `up` starts children, which wants to stay small
    checked = subprocess.run([sys.executable, "-m", "services.cli", "check", "--quiet", *words], check=False)
    if checked.returncode:
        raise typer.Exit(checked.returncode)
    from services.local.stop import is_finished
    from services.local.up import run_up

    options = loaded.config
    nothing_left = not (options.checkpoint.upload or options.evaluator.count)  # both work on after the end
    if nothing_left and is_finished(options.run.dir):
        typer.echo(
            f"{options.run.dir}: finished; more data or epochs: `draftmill extend`, again from a checkpoint: "
            "`draftmill rollback STEP`"
        )
        raise typer.Exit(ExitCode.FINISHED)
    raise typer.Exit(run_up(options, words, Console(highlight=False)))


@app.command()
def coordinator(context: typer.Context, config: ConfigFile = None) -> None:
    """The run's coordinator: plan, leases, ledger, metrics. No GPU."""
    loaded = _role(context, config, "coordinator", None)
    from services.coordinator.server import main as serve

    leave(serve(loaded.config))


@app.command()
def target(context: typer.Context, config: ConfigFile = None, index: Index = None) -> None:
    """One target server: computes hidden states."""
    loaded = _role(context, config, "target", index)
    with _in_place(loaded.config, "target", index) as place:
        from services.target.server import main as serve

        code = serve(loaded.config, new_incarnation("target"), place)
    leave_or_rest(code, linger=loaded.config.watch.linger)


@app.command()
def drafter(context: typer.Context, config: ConfigFile = None, index: Index = None) -> None:
    """One drafter trainer."""
    loaded = _role(context, config, "drafter", index)
    with _in_place(loaded.config, "drafter", index) as place:
        from services.drafter.trainer import main as train

        code = train(loaded.config, new_incarnation("drafter"), place)
    leave_or_rest(code, linger=loaded.config.watch.linger)


@app.command()
def evaluator(context: typer.Context, config: ConfigFile = None) -> None:
    """Acceptance length and held-out loss of recorded checkpoints, while the run trains."""
    loaded = _role(context, config, "evaluator", None)
    from services.evaluator.evaluator import main as evaluate_run

    leave_or_rest(evaluate_run(loaded.config), linger=loaded.config.watch.linger)


app.add_typer(runs)


@app.command()
def check(
    context: typer.Context,
    config: ConfigFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print findings and warnings only")] = False,
) -> None:
    """Validate options, model, data, memory, disk, port and run folder before anything starts."""
    loaded = load_local(config, context.obj, missing_ok=True)
    from services.check.check import check as look

    report = look(loaded)
    if not quiet:
        _print_pairs(report.facts)
    for warning in report.warnings:
        typer.echo(f"warning: {warning}", err=True)
    refuse(report.findings)


app.command(name="eval")(evaluate)


app.add_typer(models)


@app.command(name="config")
def show_config(
    context: typer.Context,
    config: ConfigFile = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print docs/options.md")] = False,
) -> None:
    """Every option with its value and where that was written."""
    from services.config.reference import current_values, options_markdown

    if markdown:
        typer.echo(options_markdown(), nl=False)
        return
    _print_pairs(
        [
            (path, f"{value}  ({origin})")
            for path, value, origin in current_values(load(config, context.obj, needs=[]))
        ]
    )


@app.command()
def metrics() -> None:
    """Print docs/metrics.md: every metric that the coordinator serves."""
    from services.coordinator.metrics import metrics_markdown

    typer.echo(metrics_markdown(), nl=False)


@app.command()
def plan(
    context: typer.Context, config: ConfigFile = None, target_rate: Rate = None, drafter_rate: Rate = None
) -> None:
    """What the run will take: steps, packs, padding, memory, and with rates hours and balance."""
    options = load_local(config, context.obj, weights=False).config
    from services.data.forecast import Rates, plan_of_run
    from services.data.forecast_view import show
    from services.local.reports import live_rates

    rates = (target_rate, drafter_rate) if target_rate and drafter_rate else live_rates(options.run.dir)
    made = plan_of_run(options, Path(options.model.path), Rates(*rates) if rates else None)
    Console().print(show(made, options))


@app.command()
def keys(folder: Annotated[Path, typer.Argument(help="new folder for the keys")]) -> None:
    """Make CURVE keys for a control plane over tcp://."""
    from protocol.keys import generate_keys

    generate_keys(folder)
    typer.echo(f"keys in {folder}; set coordinator.keys to it")


def _hints(words: Sequence[str]) -> Iterator[str]:
    """For each option that the command does not know and the schema knows by its section: its whole name."""
    group = typer.main.get_command(app)
    command = getattr(group, "commands", {}).get(next(iter(words), ""))
    known = (
        {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        if command
        else set()
    )
    for word in words[1:] if command else ():
        name = word.partition("=")[0].replace("_", "-")
        meant = [option.flag for option in OPTIONS if option.flag.endswith(f".{name[2:]}")]
        if name.startswith("--") and len(name) > 2 and name not in known and meant:
            yield f"{word}: did you mean {' or '.join(meant)}?"


def _role(context: typer.Context, config: Path | None, role: str, index: int | None) -> Loaded:
    loaded = load_local(config, context.obj)
    keep_compiled(loaded.config.run.compile_cache)
    events.setup(loaded.config.log, role, index)
    exit_on_thread_failure()
    return loaded


@contextmanager
def _in_place(config: Config, role: Literal["target", "drafter"], index: int | None) -> Iterator[int]:
    """The place that was asked for, else a free one, given back at the end; a killed process gives it too."""
    if index is not None:
        yield index
        return
    lock, taken = claim_place(config, role)
    events.setup(config.log, role, taken)
    try:
        yield taken
    finally:
        lock.release(unlink=True)


def _print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in pairs:
        table.add_row(Text(name), Text(value))
    Console(soft_wrap=True).print(table)


if __name__ == "__main__":
    main()
