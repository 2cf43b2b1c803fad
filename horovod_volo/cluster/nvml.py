"""The GPUs as NVIDIA's driver lists them, asked through its own library: CUDA stays untouched."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"  # comes with the driver
_TEXT = 96  # bytes for a UUID or a version, more than any takes


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t: the long address stands last."""

    _fields_ = (
        ("short_address", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("ids", ctypes.c_uint),
        ("subsystem_ids", ctypes.c_uint),
        ("address", ctypes.c_char * 32),
    )


def list_gpus() -> list[tuple[str, str]]:
    """Return PCI address and UUID of each GPU; none where there is no driver."""
    library = _open()
    if library is None:
        return []
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        return [gpu for number in range(count.value) if (gpu := _gpu(library, number))]
    finally:
        library.nvmlShutdown()


def driver_version() -> str:
    """Return the driver's version, or nothing where there is none."""
    library = _open()
    if library is None:
        return ""
    try:
        text = ctypes.create_string_buffer(_TEXT)
        return "" if library.nvmlSystemGetDriverVersion(text, _TEXT) else text.value.decode()
    finally:
        library.nvmlShutdown()


def visible(gpus: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return which of these GPUs CUDA_VISIBLE_DEVICES leaves, in its order; None: all, or not to be told."""
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return None
    numbers: list[int] = []
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        if name.isdecimal():
            matching = [int(name)] if int(name) < len(gpus) else []
        else:
            matching = [number for number, (_, uuid) in enumerate(gpus) if uuid.startswith(name)]
        if len(matching) != 1:
            # CUDA stops reading at the first name it does not know. MIG devices are slices of GPUs, which
            # have no names in this list: which GPU is whose cannot be told.
            return None if name.startswith("MIG-") else tuple(numbers)
        numbers += matching
    return tuple(numbers)


def _open() -> Any:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def _gpu(library: Any, number: int) -> tuple[str, str] | None:
    handle, pci = ctypes.c_void_p(), _PciInfo()
    uuid = ctypes.create_string_buffer(_TEXT)
    if library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)):
        return None
    if library.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci)):
        return None
    library.nvmlDeviceGetUUID(handle, uuid, _TEXT)
    return pci.address.decode(), uuid.value.decode()
