"""Figures of the GPU that this process computes on."""

import subprocess
import time

import pytest
import torch

from services.gpu_figures import GpuFigures, figures, uuid_of

pytestmark = pytest.mark.gpu


def test_figures_are_of_the_device_that_computes():
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py (extra gpu)")
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    uuid = uuid_of(device)
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split()
    assert uuid in listed
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    before = figures(pynvml, handle)["gpu_memory_used_bytes"]
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device).fill_(1)
    found = figures(pynvml, handle)
    assert found["gpu_memory_used_bytes"] - before >= held.nbytes
    assert found["gpu_memory_limit_bytes"] > found["gpu_memory_used_bytes"]
    assert 0 <= found["gpu_utilization_ratio"] <= 1 and 0 < found["gpu_power_watts"] < 2000
    assert 10 < found["gpu_temperature_celsius"] < 110

    watched = GpuFigures(uuid)
    ones, deadline_s = torch.ones(2048, 2048, device=device), time.monotonic() + 30.0
    while not watched.read():  # they are read in another thread while this one computes
        assert time.monotonic() < deadline_s, "no figures"
        torch.mm(ones, ones)
        torch.cuda.synchronize(device)
    assert watched.read().keys() == found.keys()
    watched.close()
