"""Commands on a model's files: a target comes in, a drafter goes out. Part of services/cli.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

models = typer.Typer()


@models.command()
def convert(
    gguf: Annotated[Path, typer.Argument(help="GGUF file of a target")],
    out: Annotated[Path, typer.Argument(help="new folder, for model.path")],
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="of the weights")] = "bfloat16",
) -> None:
    """Write a GGUF file's model and tokenizer as a folder of safetensors."""
    from services.models.convert import convert_gguf

    typer.echo(f"target in {convert_gguf(gguf, out, dtype=dtype)}")


@models.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="training checkpoint")],
    out: Annotated[Path, typer.Argument(help="new folder for the drafter in z-lab's layout")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    target: Annotated[str, typer.Option(help="folder or hub id, for the model card")] = "",
    evaluation: Annotated[Path | None, typer.Option(help="of `draftmill eval --json`, for the card")] = None,
    push_to_hub: Annotated[str, typer.Option(help="repository to upload to; a new one is private")] = "",
) -> None:
    """Write a drafter that vLLM, SGLang and z-lab's package load, check it, and describe it in a card."""
    from services.models.card import unserved
    from services.models.publish import export as publish

    found = publish(
        checkpoint, out, dtype=dtype, target=target, evaluation=evaluation, push_to_hub=push_to_hub
    )
    typer.echo(json.dumps(found, indent=1))
    typer.echo(f"drafter in {out}; {out / 'README.md'} has the commands of vLLM and SGLang for it", err=True)
    if warning := unserved(json.loads((out / "config.json").read_text())):
        typer.echo(f"warning: {warning}", err=True)
