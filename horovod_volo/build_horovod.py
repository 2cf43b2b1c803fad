"""Build a Horovod wheel for the PyTorch of this Python, and print the wheel's path; training on several ranks
needs Horovod.

    pip install "$(horovod-volo build_horovod)"
    HOROVOD_GPU_OPERATIONS=NCCL pip install "$(horovod-volo build_horovod)"     on a node without a GPU

Horovod is published as source only. pip alone builds it without PyTorch, MPI and gloo, because it builds in
an environment without them, and with a C++ standard that PyTorch no longer supports. This build takes some
minutes; it needs a C++ compiler, make, CMake and Open MPI, and for GPUs nvcc. A wheel built before is reused.

Environment variables: HOROVOD_WITHOUT_MPI=1 leaves MPI out. HOROVOD_GPU_OPERATIONS=NCCL builds NCCL in on a
machine without a GPU, and HOROVOD_BUILD_CUDA_CC_LIST=80,90 names the architectures of the GPUs.
HOROVOD_VOLO_CACHE is the folder for wheels (default: ~/.cache/horovod_volo).

Exit status: 0 done; 1 the build failed, and the last lines say why; 2 a mistake on the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod_volo.config.arguments import Parser
from horovod_volo.core.errors import refuse_mistakes

BUILD_SCRIPT = Path(__file__).parent / "cluster/build_horovod.sh"


@refuse_mistakes
def main(arguments: Sequence[str]) -> int:
    """Become the script that builds."""
    build_parser().parse_args(arguments)
    os.execvpe("bash", ["bash", str(BUILD_SCRIPT)], os.environ | {"PYTHON": sys.executable})


def build_parser() -> Parser:
    """Build the parser, which has no flags of its own."""
    return Parser(prog="horovod-volo build_horovod", description=__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
