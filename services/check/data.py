"""Whether the prepared dataset fits the plan, the model and its tokenizer, and files that options name.

Reads counts, and the tokens once, mapped, for the mask token (services/data/token_use.py has the price).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from protocol.errors import ConfigError, DataError
from protocol.keys import load_server_keys
from services.check.model import ModelFacts
from services.config.load import Loaded
from services.config.sources import Finding
from services.coordinator.sinks import check_sinks
from services.coordinator.upload import check_url
from services.data.dataset import Dataset
from services.data.plan import check_lengths
from services.data.prepare import tokenizer_fingerprint
from services.data.token_use import occurrences
from services.data.training_data import TrainingData
from services.dflash.prompts import read_prompts


def check_data(loaded: Loaded, model: ModelFacts | None) -> tuple[TrainingData | None, list[Finding]]:
    """The data is None when one of its datasets cannot be opened."""
    options = loaded.config.data
    first, findings = _check_dataset(loaded, "data.path", options.path, model)
    later = []
    for epoch, path in options.takeovers:
        dataset, more = _check_dataset(loaded, "data.later", path, model)
        later += [(epoch, dataset)] if dataset is not None else []
        findings += more
    if first is None or len(later) < len(options.takeovers):
        return None, findings
    return TrainingData(first, *later), findings


def _check_dataset(
    loaded: Loaded, option: str, path: Path, model: ModelFacts | None
) -> tuple[Dataset | None, list[Finding]]:
    plan, subject = loaded.config.plan, loaded.describe(option)
    try:
        dataset = Dataset.open(path)
    except DataError as error:
        return None, [Finding(subject, str(error))]
    findings = [Finding(subject, rule) for rule in _broken(dataset, model)]
    if model is not None and (rule := _uses_mask_token(dataset, model.drafter.mask_token_id)):
        findings.append(Finding(loaded.describe("drafter.mask_token_id", option), rule))
    try:
        check_lengths(dataset.lengths, plan.bucket_edges, plan.token_budget)
    except (DataError, ConfigError) as error:
        findings.append(Finding(loaded.describe("plan.token_budget", "plan.bucket_edges"), str(error)))
    return dataset, findings


def check_positions(loaded: Loaded, data: TrainingData, model: ModelFacts) -> list[Finding]:
    """To be told: samples that reach behind the target's positions, where its hidden states mean little."""
    longest, positions = data.longest, model.drafter.max_position_embeddings
    if longest <= positions:
        return []
    rule = f"the longest sample has {longest} tokens, the target {positions} positions"
    subject = loaded.describe("data.path", "data.max_length")
    return [Finding(subject, f"{rule}; prepare the data again with data.max_length = {positions} or less")]


def check_other_files(loaded: Loaded, model: ModelFacts | None) -> list[Finding]:
    """Files and URLs that options name beside model and data."""
    config, findings = loaded.config, list[Finding]()
    if config.eval.prompts and (rule := _broken_prompts(Path(config.eval.prompts), config.eval.limit, model)):
        findings.append(Finding(loaded.describe("eval.prompts"), rule))
    start = config.drafter.init_from
    if start and not (Path(start) / "config.json").is_file():
        rule = "has no config.json; give a drafter's folder in z-lab's layout, or leave it empty"
        findings.append(Finding(loaded.describe("drafter.init_from"), rule))
    for option, rule in (
        ("log.sinks", _refusal(check_sinks, config.log.sinks)),
        ("checkpoint.upload", _refusal(check_url, config.checkpoint.upload)),
        (
            "coordinator.keys",
            _refusal(load_server_keys, config.coordinator.keys and Path(config.coordinator.keys)),
        ),
    ):
        if rule:
            findings.append(Finding(loaded.describe(option), rule.removeprefix(f"{option} = ")))
    return findings


def _refusal(check: Callable[[Any], object], value: Any) -> str:
    """Why the option's own reader refuses `value`; an empty one is not asked for."""
    try:
        if value:
            check(value)
    except ConfigError as error:
        return str(error)
    return ""


def _broken_prompts(file: Path, limit: int, model: ModelFacts | None) -> str:
    if not file.is_file():
        return "is no file; give a JSONL file or leave it empty"
    if model is not None and model.tokenizer is None:
        return "prompts are text, and the model's folder has no tokenizer; copy it there, or leave them out"
    try:
        read_prompts(file, limit)
    except DataError as error:
        return str(error)
    return ""


def _uses_mask_token(dataset: Dataset, row: int) -> str:
    count, looked = occurrences(dataset, row)
    if not count:
        return ""
    of = "" if looked == dataset.lengths.sum() else f"first {looked:,} of "
    return (
        f"token {row}, which stands for what is still to be drafted, is {count:,} times among the {of}"
        f"{int(dataset.lengths.sum()):,} tokens of the data; choose an embedding row that they never use"
    )


def _broken(dataset: Dataset, model: ModelFacts | None) -> list[str]:
    rules = []
    if not dataset.supervised.all():
        sample = int(np.argmin(dataset.supervised))
        rules.append(f"sample {sample} has an all-zero loss mask: nothing to learn; prepare the data again")
    if model is None:
        return rules
    rows = dataset.info.get("embedding_rows")
    if rows is not None and rows != model.rows:
        rules.append(f"was prepared for {rows} embedding rows, the model has {model.rows}; prepare it again")
    prepared_with = dataset.info.get("tokenizer_sha256")
    if model.tokenizer is None or prepared_with is None:
        return rules
    if prepared_with != tokenizer_fingerprint(model.tokenizer):
        rules.append("was prepared with another tokenizer than the model's; prepare it again")
    return rules
