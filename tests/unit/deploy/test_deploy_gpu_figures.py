"""Where there is no GPU there are no figures, and no noise. tests/gpu has the rest."""

import threading

import torch

from services import gpu_figures
from services.coordinator.metrics import FAMILIES
from services.gpu_figures import GpuFigures, uuid_of


def test_a_cpu_has_none():
    assert uuid_of(torch.device("cpu")) == ""
    assert GpuFigures("").read() == {}


def test_a_gpu_that_nvml_does_not_know_has_none():
    watched = GpuFigures("GPU-00000000-0000-0000-0000-000000000000")
    assert watched.read() == {}
    watched.close()


class Odd:
    """A binding that takes no text, as older ones did."""

    def nvmlInit(self) -> None:
        raise TypeError("bytes expected")


def test_whatever_nvml_raises_ends_no_role(monkeypatch):
    told = threading.Event()
    monkeypatch.setattr(gpu_figures, "_nvml", Odd)
    monkeypatch.setattr(gpu_figures.log, "warning", lambda *_, **__: told.set())
    assert GpuFigures("GPU-1").read() == {}
    assert told.wait(10)


def test_every_figure_is_a_metric():
    names = {family.name for family in FAMILIES if family.name.startswith("draftmill_gpu_")}
    told = {"utilization_ratio", "memory_used_bytes", "memory_limit_bytes", "power_watts",
            "temperature_celsius"}  # fmt: skip
    assert names == {f"draftmill_gpu_{name}" for name in told}
