"""Where there is no GPU there are no figures, and no noise. tests/gpu has the rest."""

import torch

from services.coordinator.metrics import FAMILIES
from services.gpu_figures import GpuFigures, uuid_of


def test_a_cpu_has_none():
    assert uuid_of(torch.device("cpu")) == ""
    assert GpuFigures("").read() == {}


def test_a_gpu_that_nvml_does_not_know_has_none():
    watched = GpuFigures("GPU-00000000-0000-0000-0000-000000000000")
    assert watched.read() == {}
    watched.close()


def test_every_figure_is_a_metric():
    names = {family.name for family in FAMILIES if family.name.startswith("draftmill_gpu_")}
    told = {"utilization_ratio", "memory_used_bytes", "memory_limit_bytes", "power_watts",
            "temperature_celsius"}  # fmt: skip
    assert names == {f"draftmill_gpu_{name}" for name in told}
