"""A whole run on two GPUs: drafters over NCCL, sums during backward passes, one of them killed half way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "process"))

from harness import Run, write_data, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]


@pytest.mark.parametrize("elastic", ["shrink", "wait"])
def test_a_run_that_loses_a_drafter_counts_every_sample_once(tmp_path: Path, elastic: str) -> None:
    model, data = write_model(tmp_path / "model"), write_data(tmp_path / "data")
    run = Run(
        tmp_path, elastic, model, data, targets=2, drafters=2, target_more='gpus = ["0", "1"]',
        # heads of 8 are too small for flex attention's kernels
        drafter_more=f'gpus = ["0", "1"]\nelastic = "{elastic}"\nattention = "dense"',
    )  # fmt: skip
    try:
        run.start()
        run.wait_step(4)
        run.kill("drafter-1")
        run.wait_finished(revive=True)
        run.assert_exactly_once()
        run.assert_nothing_left()
    finally:
        run.close()
