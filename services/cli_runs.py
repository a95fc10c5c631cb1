"""Commands on a run's folder: what it does, and what is to become of it. Part of services/cli.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from protocol.errors import PeerGone
from protocol.traces import LEAST_S, MOST_S
from services.config.load import load
from services.models.hub import load_local

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file of options", show_default=False)]
RunFolder = Annotated[
    Path | None, typer.Argument(help="folder of the run; none: run.dir", show_default=False)
]

runs = typer.Typer()


@runs.command()
def status(
    context: typer.Context,
    run: RunFolder = None,
    config: ConfigFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="the coordinator's own JSON")] = False,
    traced: Annotated[
        str,
        typer.Option("--trace", help="a role (target-0): record what it does, print the file"),
    ] = "",
    trace_seconds: Annotated[float, typer.Option(min=LEAST_S, max=MOST_S, help="length of the trace")] = 3.0,
) -> None:
    """Roles, slots and who holds them, pool, step, ledger counts, advice; or a trace of one role."""
    from services.local.reports import status_report
    from services.local.status import RESULT, fetch, fetch_json, read_address
    from services.local.stop import ended

    folder = _run_dir(context, run, config)
    if traced:
        from services.local.trace import trace

        typer.echo(trace(folder, traced, trace_seconds))
        return
    console = Console(highlight=False)
    try:
        address = read_address(folder)
        if as_json:
            typer.echo(json.dumps(fetch_json(address), indent=1))
        else:
            console.print(status_report(fetch(address)))
    except PeerGone:
        last = ended(folder)
        if last is None:
            raise
        if as_json:
            typer.echo((folder / RESULT).read_text(encoding="utf-8"))
            return
        console.print(status_report(last))


@runs.command()
def stop(context: typer.Context, run: RunFolder = None, config: ConfigFile = None) -> None:
    """Stop the run cleanly: finish the step, record a checkpoint, leave."""
    from services.local.reports import ending
    from services.local.status import Status
    from services.local.stop import ended
    from services.local.stop import stop as stop_and_wait

    def tell(status: Status) -> None:
        waits = f"no checkpoint yet ({status.reason})" if status.reason else "ends the step and saves it"
        typer.echo(f"{status.state}, step {status.step} of {status.total_steps}: {waits}", err=True)

    folder = _run_dir(context, run, config)
    try:
        last = stop_and_wait(folder, tell)
    except PeerGone:
        over = ended(folder)  # nothing is left to stop
        if over is None:
            raise
        last = over
    typer.echo(ending(last))


@runs.command()
def rollback(
    context: typer.Context,
    step: Annotated[int, typer.Argument(help="of a kept checkpoint", min=0)],
    config: ConfigFile = None,
) -> None:
    """Let a stopped run go on from an earlier checkpoint, on a new timeline; nothing is deleted."""
    options = load_local(config, context.obj).config
    from services.coordinator.rollback import roll_back

    timeline, row = roll_back(options, step)
    typer.echo(f"timeline {timeline} starts from {row.name}, step {row.at.step}; start the run to go on")


@runs.command()
def extend(context: typer.Context, config: ConfigFile = None) -> None:
    """Give a stopped run the data and epochs of its options, from the next epoch on; what is done stays."""
    options = load_local(config, context.obj).config
    from services.coordinator.extend import extend as take_over

    now = take_over(options)
    typer.echo(
        f"planned anew from epoch {now.first_epoch} on: {now.total_steps} steps, "
        f"{now.committed_steps} of them done; start the run to go on"
    )


def _run_dir(context: typer.Context, run: Path | None, config: Path | None) -> Path:
    return run or load(config, context.obj, needs=[]).config.run.dir
