"""`draftmill check`: everything that would stop a run, found before anything starts or is replaced.

Reads configuration, headers, lengths and free space; writes nothing. All findings at once.
"""

from __future__ import annotations

from typing import NamedTuple

from services.check.data import check_data, check_other_files, check_positions
from services.check.devices import Devices, check_devices, gpu_memory
from services.check.machine import (
    arenas_size,
    check_places,
    check_room,
    check_worth,
    checkpoint_size,
    host_memory,
    named,
    slot_size,
)
from services.check.model import ModelFacts, check_model
from services.check.run_folder import check_run_folder, is_running
from services.config.load import Loaded
from services.config.sources import Finding
from services.data.dataset import Dataset
from services.data.gpu_memory import most_positions
from services.data.plan import Schedule
from services.data.training_data import TrainingData
from services.local.view import size


class Report(NamedTuple):
    """`facts` as (name, value) for people; a run may start when `findings` is empty, `warnings` or not."""

    facts: list[tuple[str, str]]
    findings: list[Finding]
    warnings: list[Finding]


def check(loaded: Loaded) -> Report:
    """Look at everything that `loaded` names."""
    model, findings = check_model(loaded)
    data, more = check_data(loaded, model)
    positions = 0 if data is None or more else most_positions(loaded.config, data.longest)
    findings += more
    findings += check_other_files(loaded, model)
    findings += check_run_folder(loaded, data)
    findings += check_places(loaded, port_is_ours=is_running(loaded.config.run.dir))
    devices = Devices([], [], [])
    if model is not None:
        findings += check_room(loaded, model)
        devices = check_devices(loaded, model, positions, gpu_memory())
        findings += devices.findings
    facts = _facts(loaded, model, data if not findings else None) + devices.facts
    warnings = check_worth(loaded) + devices.warnings
    if model is not None and data is not None:
        warnings += check_positions(loaded, data, model)
    return Report(facts, findings, warnings)


def _facts(loaded: Loaded, model: ModelFacts | None, data: TrainingData | None) -> list[tuple[str, str]]:
    config, facts = loaded.config, []
    if model is not None:
        shape, memory = model.drafter, host_memory(config, model)
        taps = ",".join(map(str, shape.target_layer_ids))
        facts += [
            (
                "target",
                f"{model.folder}, {size(model.weight_bytes)} of weights, {model.rows:,} embedding rows"
                + ("" if model.tokenizer else ", no tokenizer: tokenized data only"),
            ),
            (
                "drafter",
                f"{shape.parameter_count:,} parameters, taps {taps}, mask token {shape.mask_token_id}",
            ),
            ("slot", size(slot_size(config, model))),
            (
                "arenas",
                f"{size(arenas_size(config, model))} in {config.arena.dir} (two incarnations of each target)",
            ),
            ("memory", f"{size(sum(memory.values()))} at most ({named(memory)})"),
            ("checkpoint", f"{size(checkpoint_size(model))} each, in {config.run.dir / 'checkpoints'}"),
        ]
    if data is not None:
        for start, dataset in data.parts:
            facts.append((f"data from epoch {start}" if start else "data", _sizes(dataset)))
        steps = Schedule(config, data).total_steps
        facts.append(("plan", f"{steps} steps in {config.run.epochs} epochs"))
    return facts


def _sizes(dataset: Dataset) -> str:
    tokens = f"{int(dataset.lengths.sum()):,} tokens, {int(dataset.supervised.sum()):,} of them supervised"
    return f"{len(dataset):,} samples, {tokens}; the longest has {int(dataset.lengths.max())}"
