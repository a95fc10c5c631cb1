"""`draftmill inspect`: what the drafter will be trained on, for the eye, and what looks wrong with it.

Without a row: statistics and warnings. With one: the sample's text, its supervised tokens marked, and
each answer's first and last token, where masks go wrong by one. Reads the whole dataset once for the
warnings, 0.3 s per 100 M tokens.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from protocol.errors import ModelError
from services.data.dataset import Dataset, Sample
from services.data.prepare import tokenizer_fingerprint
from services.data.statistics import PERCENTILES, describe
from services.data.token_use import occurrences
from services.data.turns import ChatTemplate
from services.dflash.drafter_config import choose_mask_token_id

SUPERVISED, PROMPT, SPECIAL = "black on green3", "grey62", "bold magenta"
FEW_SUPERVISED = 0.02
MANY_DUPLICATES = 0.01
SPECIAL_NOTES = {
    "last answer not behind the prompt that a server sends":
        "last answers stand behind another prompt than a server sends: is data.thinking what will be served?",
    "cut off at the limit": "answers are cut off at data.max_length, without their end token",
}  # fmt: skip


class Target(NamedTuple):
    """What is known of the model the data is for."""

    name: str
    tokenizer: Any
    stop_ids: frozenset[int]


def inspect(data: Path, row: int | None, tokenizer: str | None, console: Console) -> list[str]:
    """Show the dataset `data`, or its sample `row`; returns the warnings that were shown.

    `tokenizer` is the model to compare with and to decode by; None: the one it was prepared for, if that
    still exists. Raises DataError for a missing dataset or row, ModelError for a tokenizer that cannot
    be loaded although it was named.
    """
    dataset = Dataset.open(data)
    target = _load_target(tokenizer, dataset)
    if row is not None:
        console.print(_sample_view(dataset, row, target, marks=console.color_system is None))
        return []
    warnings = find_warnings(dataset, target)
    console.print(_overview(dataset))
    for warning in warnings:
        console.print(Text.assemble(("warning ", "bold yellow"), warning))
    if target is None:
        console.print(Text("no tokenizer found: stop tokens and fingerprints were not compared", "yellow"))
    return warnings


def find_warnings(dataset: Dataset, target: Target | None) -> list[str]:
    """What looks wrong, one sentence each; nothing if all is well."""
    statistics = dataset.info.get("statistics") or describe(dataset.blocks())
    rows, found = statistics["rows"], []
    if statistics["all_one_masks"]:
        found.append(
            f"{statistics['all_one_masks']} of {rows} samples are supervised throughout, prompt included"
        )
    if statistics["supervised_share"] < FEW_SUPERVISED:
        found.append(f"only {statistics['supervised_share']:.1%} of the tokens are supervised")
    duplicates = statistics["duplicates"] - dataset.info.get("copies_by_weight", 0)
    if duplicates > MANY_DUPLICATES * rows:
        found.append(f"{duplicates} of {rows} samples are duplicates")
    for note, text in SPECIAL_NOTES.items():
        count = dataset.info.get("notes", {}).get(note, 0)
        if count:
            found.append(f"{count} {text}")
    return found + (_target_warnings(dataset, target) if target is not None else [])


def _target_warnings(dataset: Dataset, target: Target) -> list[str]:
    found = []
    seen = _supervised_ids(dataset, target.tokenizer)
    if target.stop_ids and not seen & target.stop_ids:
        names = ", ".join(repr(target.tokenizer.decode([token])) for token in sorted(target.stop_ids))
        found.append(f"no answer ends with a stop token ({names}): the drafter will not learn to stop")
    mask = _mask_row(dataset, target)
    if mask is not None and (count := occurrences(dataset, mask)[0]):
        name = target.tokenizer.decode([mask])
        found.append(
            f"the mask token {name!r} ({mask}) is in the data, {count} times; set drafter.mask_token_id to a "
            "row that it never uses"
        )
    recorded = dataset.info.get("tokenizer_sha256")
    if recorded and recorded != tokenizer_fingerprint(target.tokenizer):
        found.append(f"prepared with another tokenizer than {target.name}'s: prepare it again")
    template = dataset.info.get("template_sha256")
    own = _template_fingerprint(target.tokenizer, dataset.info.get("thinking", "train"))
    if template and own and template != own:
        found.append(f"prepared with another chat template than {target.name}'s")
    return found


def _template_fingerprint(tokenizer: Any, thinking: Any) -> str | None:
    return ChatTemplate(tokenizer, thinking).fingerprint if tokenizer.chat_template else None


def _supervised_ids(dataset: Dataset, tokenizer: Any) -> frozenset[int]:
    """Ids that occur supervised, anywhere."""
    seen = np.zeros(
        max(len(tokenizer), 1 + max(int(block.input_ids.max()) for block in dataset.blocks())), bool
    )
    for block in dataset.blocks():
        seen[block.input_ids[block.loss_mask == 1]] = True
    return frozenset(np.flatnonzero(seen).tolist())


def _mask_row(dataset: Dataset, target: Target) -> int | None:
    """What drafters of this target get as their mask unless an option names another; None: no such row."""
    rows = dataset.info.get("embedding_rows") or len(target.tokenizer)
    try:
        return choose_mask_token_id(target.tokenizer, rows, target.stop_ids)
    except ModelError:
        return None  # `draftmill check` says so


def _load_target(name: str | None, dataset: Dataset) -> Target | None:
    from transformers import AutoTokenizer

    chosen = name or dataset.info.get("model")
    if not chosen:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(chosen)
    except (OSError, ValueError) as error:
        if name is None:
            return None
        raise ModelError(f"{name}: no tokenizer can be loaded: {error}") from None
    return Target(chosen, tokenizer, _stop_ids(chosen, tokenizer))


def _stop_ids(name: str, tokenizer: Any) -> frozenset[int]:
    """What generation stops at: the model's configuration decides, then the tokenizer."""
    from transformers import AutoConfig, GenerationConfig

    for source in (GenerationConfig, AutoConfig):
        try:
            ids = source.from_pretrained(name).eos_token_id
        except (OSError, ValueError):
            continue
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])


def _overview(dataset: Dataset) -> RenderableType:
    info, statistics = dataset.info, dataset.info.get("statistics") or describe(dataset.blocks())
    table = Table(title=str(dataset.path), show_header=False)
    table.add_row("rows", f"{statistics['rows']:,}")
    table.add_row("tokens", f"{statistics['tokens']:,}")
    table.add_row("supervised", f"{statistics['supervised_tokens']:,} ({statistics['supervised_share']:.1%})")
    for name, title in (("length", "tokens a sample"), ("supervised", "of them supervised")):
        spread = statistics[name]
        shown = [*(f"p{at}" for at in PERCENTILES), "mean"]
        table.add_row(title, "  ".join(f"{key} {spread[key]:,}" for key in shown))
    table.add_row("duplicates", f"{statistics['duplicates']:,}")
    for title, key in (("left out", "skipped"), ("noted", "notes")):
        for kind, count in info.get(key, {}).items():
            table.add_row(title, f"{count:,} x {kind}")
    for key in ("model", "thinking", "max_length", "template_sha256"):
        if info.get(key) is not None:
            table.add_row(key, str(info[key]))
    table.add_row("fingerprint", dataset.fingerprint)
    return table


def _sample_view(dataset: Dataset, row: int, target: Target | None, marks: bool) -> RenderableType:
    """With `marks`, answers stand between ⟦ and ⟧ too, for where there are no colours."""
    sample, source = dataset.sample(row), dataset.source(row)
    inputs = dataset.info.get("inputs", [])
    origin = f"{inputs[source.file]}:{source.line}" if source.file < len(inputs) else f"row {source.line}"
    text, answers = Text(), Table("answer", "tokens", "first", "last")
    for run in _runs(sample):
        supervised = bool(sample.loss_mask[run.start])
        shown = _run_text(sample.input_ids[run.start : run.stop], supervised, target)
        text.append_text(Text("⟦") + shown + Text("⟧") if supervised and marks else shown)
        if supervised:
            first, last = (_decode(sample.input_ids[at : at + 1], target) for at in (run.start, run.stop - 1))
            answers.add_row(str(answers.row_count), f"{run.start} to {run.stop - 1}", repr(first), repr(last))
    title = (
        f"sample {row}   {origin}   {len(sample.input_ids)} tokens, {int(sample.loss_mask.sum())} supervised"
    )
    return Group(Panel(text, title=title), answers)


def _runs(sample: Sample) -> list[range]:
    """Stretches of equal mask, in order."""
    edges = np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8))) + 1
    bounds = [0, *edges.tolist(), len(sample.loss_mask)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _run_text(ids: np.ndarray, supervised: bool, target: Target | None) -> Text:
    """Special tokens stand out, and line ends show."""
    shown = Text(_decode(ids, target).replace("\n", "⏎\n"), SUPERVISED if supervised else PROMPT)
    if target is not None:
        shown.highlight_words([str(token) for token in target.tokenizer.all_special_tokens], SPECIAL)
    return shown


def _decode(ids: np.ndarray, target: Target | None) -> str:
    if target is None:
        return " ".join(map(str, ids.tolist())) + " "
    text = target.tokenizer.decode(
        ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text
