"""The GPUs as NVML, the library of NVIDIA's driver, lists them; CUDA is not initialized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import pynvml


def list_gpus() -> list[tuple[str, str]]:
    """Return PCI address and UUID of each GPU; nothing without a driver."""
    gpus = []
    with _nvml() as available:
        for index in range(pynvml.nvmlDeviceGetCount() if available else 0):
            with suppress(pynvml.NVMLError):  # a GPU that has failed does not hide the others
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append((pynvml.nvmlDeviceGetPciInfo(handle).busId, pynvml.nvmlDeviceGetUUID(handle)))
    return gpus


def driver_versions() -> tuple[str, int]:
    """Return the driver's version and the newest CUDA that it supports, as 12040 for 12.4; else "" and 0."""
    version, cuda = "", 0
    with _nvml() as available:
        if available:
            version = pynvml.nvmlSystemGetDriverVersion()
            cuda = pynvml.nvmlSystemGetCudaDriverVersion()
    return version, cuda


def cuda_visible_devices(
    gpus: Sequence[tuple[str, str]], environment: Mapping[str, str]
) -> tuple[int, ...] | None:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES selects, in its order.

    None: the variable is not set, or names MIG devices.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    indices: list[int] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name.isdecimal():
            matching = [int(name)] if int(name) < len(gpus) else []
        else:
            matching = [index for index, (_, uuid) in enumerate(gpus) if uuid.startswith(name)]
        if len(matching) != 1:
            # CUDA ignores the rest of the list from the first invalid name on. A MIG device is a part of a
            # GPU that this list does not contain: nobody can say of which.
            return None if name.startswith("MIG-") else tuple(indices)
        indices += matching
    return tuple(indices)


@contextmanager
def _nvml() -> Iterator[bool]:
    """Initialize NVML inside the block; yield False where there is no driver. An error ends the block."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    with suppress(pynvml.NVMLError):
        try:
            yield True
        finally:
            pynvml.nvmlShutdown()
