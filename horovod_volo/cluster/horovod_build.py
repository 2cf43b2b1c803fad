"""How the installed Horovod was built; read without initializing it."""

from __future__ import annotations

import contextlib
import ctypes
import io
from dataclasses import dataclass
from pathlib import Path

from horovod_volo.core.errors import UserError

BUILD_SCRIPT = Path(__file__).with_name("build_horovod.sh")
BUILD = 'pip install "$(horovod-volo build_horovod)"'
_REBUILD = (
    "Build it for the PyTorch that is installed: "
    'pip install --force-reinstall --no-deps "$(horovod-volo build_horovod)".'
)
_MAX_VERSION_BYTES = 8192  # MPI_MAX_LIBRARY_VERSION_STRING of MPICH, the longest


@dataclass(frozen=True)
class HorovodBuild:
    """Version and build options of a Horovod that PyTorch can use."""

    version: str
    mpi: bool
    gloo: bool
    nccl: bool
    mpi_library: str  # name and version; empty without MPI


def read_build() -> HorovodBuild:
    """Return how Horovod was built; raise UserError where PyTorch cannot use it."""
    try:
        # A Horovod without PyTorch support prints to stdout, which --json - reserves, and does not raise.
        with contextlib.redirect_stdout(io.StringIO()):
            import horovod
            import horovod.torch as hvd
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "horovod":
            raise
        raise UserError(
            f"Horovod is not installed in this Python, and several ranks need it. Build it: {BUILD}. "
            "One rank needs no Horovod: start it without a launcher."
        ) from None
    except (ImportError, OSError) as error:
        cause = str(error).splitlines()[0]
        raise UserError(f"Horovod does not load: {cause}. {_REBUILD}") from None
    if not hasattr(hvd, "init"):
        raise UserError(f"Horovod {horovod.__version__} was built without PyTorch. {_REBUILD}")
    return HorovodBuild(
        version=horovod.__version__,
        mpi=hvd.mpi_built(),
        gloo=hvd.gloo_built(),
        nccl=bool(hvd.nccl_built()),
        mpi_library=_mpi_library() if hvd.mpi_built() else "",
    )


def _mpi_library() -> str:
    """Return name and version of the MPI library that Horovod loaded; legal before MPI_Init."""
    text, length = ctypes.create_string_buffer(_MAX_VERSION_BYTES), ctypes.c_int()
    if ctypes.CDLL(None).MPI_Get_library_version(text, ctypes.byref(length)):
        return ""
    return text.value.decode(errors="replace").partition(",")[0].strip()
