"""Finds operations that make the host wait for a GPU, without a GPU."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that return numbers or shapes to the host.
SYNCHRONISING = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2"}


class RefuseSynchronisation(TorchDispatchMode):
    """Raises RuntimeError at an operation that would synchronise with a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in SYNCHRONISING or by_mask or _waits_for_copy(name, args, kwargs):
            raise RuntimeError(f"{func} would synchronise with the device")
        return func(*args, **kwargs)


def _waits_for_copy(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether this is a copy between host and GPU that ends before the host continues."""
    if name == "_to_copy":
        source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
        non_blocking = kwargs.get("non_blocking", False)
    elif name == "copy_":
        source, target = args[1].device, args[0].device
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    else:
        return False
    return source.type != target.type and not non_blocking
