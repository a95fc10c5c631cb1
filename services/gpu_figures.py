"""How the GPU of this process does, for the report: utilization, memory, power, temperature.

    {"gpu_utilization_ratio": 0.97, "gpu_memory_used_bytes": 6.1e10, "gpu_memory_limit_bytes": 1.5e11,
     "gpu_power_watts": 612.0, "gpu_temperature_celsius": 58.0}

From NVML, through the package `nvidia-ml-py` (extra `gpu`); without it, or on a CPU, there are none. A
thread reads them once a second, because a driver may take milliseconds to answer; `read` takes none.
"""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any

log = logging.getLogger(__name__)

PERIOD_S = 1.0


class GpuFigures:
    """The newest figures of one GPU, named by its uuid; "" for a CPU. Starts at once, ends with us."""

    def __init__(self, uuid: str) -> None:
        self._figures: dict[str, float] = {}
        self._stop = threading.Event()
        nvml = _nvml() if uuid else None
        if nvml is not None:
            threading.Thread(target=self._watch, args=(nvml, uuid), name="gpu", daemon=True).start()

    def read(self) -> dict[str, float]:
        return self._figures

    def close(self) -> None:
        self._stop.set()

    def _watch(self, nvml: Any, uuid: str) -> None:
        try:
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            while not self._stop.wait(PERIOD_S):
                self._figures = figures(nvml, handle)
        except Exception as error:  # noqa: BLE001 - NVML's or its binding's: figures only, no role ends for them
            log.warning("no figures of the GPU", extra={"uuid": uuid, "error": str(error)})
            self._figures = {}


def figures(nvml: Any, handle: Any) -> dict[str, float]:
    """One reading. NVMLError: the driver does not answer."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {
        "gpu_utilization_ratio": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "gpu_memory_used_bytes": float(memory.used),
        "gpu_memory_limit_bytes": float(memory.total),
        "gpu_power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "gpu_temperature_celsius": float(
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
    }  # fmt: skip


def uuid_of(device: Any) -> str:
    """NVML's name of a torch device; "" unless it is an NVIDIA GPU."""
    if device.type != "cuda":
        return ""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _nvml() -> Any:
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        log.info("no figures of the GPU: nvidia-ml-py is not installed (extra gpu)")
        return None
