"""Gauges of a rank's device, sampled on a thread of its own."""

import threading

import torch

from elche.v1 import rank_pb2
from elche_worker.device.kinds import kind_of
from elche_worker.telemetry import nvml

EVERY_S = 1.0
"""Seconds between two samples; NVML itself averages a GPU's load over up to one second."""


class GaugeSampler:
    """Samples a device once a second on a thread. `take` returns a new sample, which the loop completes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml = nvml.opened(device)
        self._newest: rank_pb2.Gauges | None = None
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="gauges", daemon=True).start()

    def take(self) -> rank_pb2.Gauges | None:
        """The newest sample, or None if it was taken before."""
        newest, self._newest = self._newest, None
        return newest

    def stop(self) -> None:
        """Stops sampling."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            memory = kind_of(self._device).memory(self._device)
            sample = rank_pb2.Gauges(
                memory_used_bytes=memory.used,
                memory_reserved_bytes=memory.reserved,
                memory_peak_bytes=memory.peak,
                memory_total_bytes=memory.total,
            )
            if self._nvml is not None:
                self._nvml.add_to(sample)
            self._newest = sample
            if self._stop.wait(EVERY_S):
                return
