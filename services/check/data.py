"""Whether the prepared dataset fits the plan, the model and its tokenizer. Reads no tokens, only counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from protocol.errors import ConfigError, DataError
from services.check.model import ModelFacts
from services.config.load import Loaded
from services.config.sources import Finding
from services.data.dataset import Dataset
from services.data.plan import check_lengths
from services.data.prepare import tokenizer_fingerprint
from services.data.training_data import TrainingData


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
    try:
        check_lengths(dataset.lengths, plan.bucket_edges, plan.token_budget)
    except (DataError, ConfigError) as error:
        findings.append(Finding(loaded.describe("plan.token_budget", "plan.bucket_edges"), str(error)))
    return dataset, findings


def check_other_files(loaded: Loaded) -> list[Finding]:
    """Files and URLs that options name beside model and data."""
    config, findings = loaded.config, []
    if config.eval.prompts and not Path(config.eval.prompts).is_file():
        findings.append(
            Finding(loaded.describe("eval.prompts"), "is no file; give a JSONL file or leave it empty")
        )
    start = config.drafter.init_from
    if start and not (Path(start) / "config.json").is_file():
        rule = "has no config.json; give a drafter's folder in z-lab's layout, or leave it empty"
        findings.append(Finding(loaded.describe("drafter.init_from"), rule))
    return findings


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
