"""A trace on a GPU: kernels of the thread that turns, copies of one that does not."""

import gzip
import json
import threading

import pytest
import torch

from services.local.trace import trace
from services.tracer import Tracer, span

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_trace_has_the_kernels_and_the_copies_of_every_thread(tmp_path):
    device, stop = torch.device("cuda", torch.cuda.device_count() - 1), threading.Event()
    tracer = Tracer(tmp_path, lambda: "target-0", device)

    def compute() -> None:
        torch.cuda.set_device(device)
        a, done = torch.ones(2048, 2048, device=device), torch.cuda.Event(blocking=True)
        with tracer.working():
            while not stop.is_set():
                tracer.turn()
                with span("product"):
                    a @ a
                done.record()
                done.synchronize()

    def copy() -> None:
        torch.cuda.set_device(device)
        source, sink = torch.ones(1 << 20, device=device), torch.empty(1 << 20, pin_memory=True)
        stream = torch.cuda.Stream()
        while not stop.is_set():
            with torch.cuda.stream(stream):
                sink.copy_(source, non_blocking=True)
            stream.synchronize()

    threads = [threading.Thread(target=compute), threading.Thread(target=copy)]
    for thread in threads:
        thread.start()
    tracer.start()
    try:
        files = [trace(tmp_path, "target-0", 1.0) for _ in range(2)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        tracer.close()
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        kinds = {event.get("cat") for event in events}
        assert {"kernel", "gpu_memcpy", "user_annotation", "cpu_op"} <= kinds
        assert {"product", "aten::mm"} <= {event["name"] for event in events}
