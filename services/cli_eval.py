"""`draftmill eval`: what a drafter is worth with its target, as a table, JSON and a picture.

`--eval.prompts`, `--eval.limit`, `--eval.max-new-tokens` and `--eval.thinking` are options of the schema;
what belongs to one call stands here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from protocol.errors import ConfigError
from services.models.hub import load_local


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(help="training checkpoint, or a drafter in z-lab's layout")],
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of options", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="e.g. cpu, cuda:0; empty: the first GPU, else the CPU")] = "",
    block_sizes: Annotated[
        str, typer.Option(help="tokens of a block, several with commas; empty: the drafter's own")
    ] = "",
    temperature: Annotated[float, typer.Option(help="0: greedy, and checked to be lossless", min=0.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="1: all tokens", min=0.0, max=1.0)] = 1.0,
    plain: Annotated[
        bool, typer.Option(help="decode without the drafter too, to compare speeds, one prompt at a time")
    ] = True,
    processes: Annotated[
        int, typer.Option(help="share the prompts out: several keep a GPU busy, but tell no speed", min=1)
    ] = 1,
    picture: Annotated[Path | None, typer.Option(help="SVG file for acceptance by position")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table")] = False,
) -> None:
    """Speculative decoding with the target on the held-out prompts of eval.prompts."""
    sizes = _sizes(block_sizes)
    if not temperature and top_p != 1.0:
        raise ConfigError(
            f"--top-p {top_p:g}: greedy decoding takes the best token; give a --temperature too"
        )
    if picture is not None and not picture.absolute().parent.is_dir():
        raise ConfigError(f"--picture {picture}: there is no folder {picture.parent}; make it first")
    options = load_local(config, context.obj, needs=["model.path"]).config
    from services.dflash.eval_parts import run_evals_in_parts
    from services.dflash.eval_picture import picture as draw
    from services.dflash.eval_result import comparison, to_json
    from services.dflash.sampling import Sampling

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=None)
        found = run_evals_in_parts(
            checkpoint, options, processes=processes,
            device=device_named(device),
            block_sizes=sizes, plain=plain,
            sampling=Sampling(temperature, top_p, options.run.seed) if temperature else None,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
        )  # fmt: skip
    if picture is not None:
        picture.write_text(draw(found), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(to_json(found), indent=1))
        return
    console = Console()
    for result in found:
        console.print(result.table())
    if len(found) > 1:
        console.print(comparison(found))


def device_named(name: str) -> str:
    """What `--device` says, as torch writes it; empty: the first GPU, else the CPU. Raises ConfigError."""
    import torch

    count = torch.cuda.device_count()
    if not name:
        return "cuda:0" if count else "cpu"
    if name == "cpu":
        return name
    found = re.fullmatch(r"cuda|(?:cuda:)?(\d+)", name)
    if found is None:
        raise ConfigError(f"--device {name}: a device is cpu, or a GPU as torch counts them: cuda:0")
    number = int(found[1] or 0)
    if number >= count:
        raise ConfigError(
            f"--device {name}: there is no GPU {number} here ({count} in all); name another, or cpu"
        )
    return f"cuda:{number}"


def _sizes(text: str) -> list[int]:
    """Each once, in the order given."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError as error:
        raise ConfigError(f"--block-sizes {text}: must be whole numbers with commas, as in 4,8,16") from error
