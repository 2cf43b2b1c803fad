"""What the installed Horovod was built with; asked without meeting any rank."""

from __future__ import annotations

import contextlib
import ctypes
import io
from dataclasses import dataclass

from horovod_volo.core.errors import UserError

_REBUILD = (
    "Build it for the PyTorch that is installed: "
    'pip install --force-reinstall --no-deps "$(./tools/build_horovod)".'
)
_TEXT = 8192  # bytes: MPI_MAX_LIBRARY_VERSION_STRING of MPICH, the longest


@dataclass(frozen=True)
class Build:
    """An installed Horovod that PyTorch can use."""

    version: str
    mpi: bool
    gloo: bool
    nccl: bool
    mpi_library: str  # what its MPI calls itself; empty without MPI


def read_build() -> Build:
    """Return what Horovod was built with; raise UserError where it cannot be used with PyTorch."""
    try:
        # A Horovod without its PyTorch part says so on stdout, which belongs to reports, and goes on.
        with contextlib.redirect_stdout(io.StringIO()):
            import horovod
            import horovod.torch as hvd
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "horovod":
            raise
        raise UserError("Horovod is not installed in this Python. Run ./tools/setup.") from None
    except (ImportError, OSError) as problem:
        cause = str(problem).splitlines()[0]
        raise UserError(f"Horovod does not load: {cause}. {_REBUILD}") from None
    if not hasattr(hvd, "init"):
        raise UserError(f"Horovod {horovod.__version__} was built without PyTorch. {_REBUILD}")
    return Build(
        version=horovod.__version__,
        mpi=hvd.mpi_built(),
        gloo=hvd.gloo_built(),
        nccl=bool(hvd.nccl_built()),
        mpi_library=_mpi_library() if hvd.mpi_built() else "",
    )


def _mpi_library() -> str:
    """Ask the MPI that Horovod brought into this process; the one call that is allowed before any start."""
    text, length = ctypes.create_string_buffer(_TEXT), ctypes.c_int()
    if ctypes.CDLL(None).MPI_Get_library_version(text, ctypes.byref(length)):
        return ""
    return text.value.decode(errors="replace").partition(",")[0].strip()
