"""Build Horovod, which several ranks need, for this Python's PyTorch; print the wheel's path, or install it.

    horovod-volo build-horovod --install                      for this machine
    horovod-volo build-horovod --install --nccl --cc 80,90    for nodes with GPUs, on one without

By itself, pip builds a Horovod without PyTorch, MPI and gloo. This takes some minutes, and needs a C++
compiler, make, CMake, Open MPI, and for GPUs the nvcc of PyTorch's CUDA. Wheels are kept and reused in
~/.cache/horovod_volo, or in the folder that the variable HOROVOD_VOLO_CACHE names.

Exit status: 0 done; 1 the build failed, and the last lines say why; 2 a mistake on the command line.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod_volo.config.arguments import Parser
from horovod_volo.core.errors import refuse_mistakes

BUILD_SCRIPT = Path(__file__).parent / "cluster/build_horovod.sh"


@refuse_mistakes
def main(arguments: Sequence[str]) -> int:
    """Become the script that builds, which has the same flags."""
    build_parser().parse_args(arguments)
    os.execvpe("bash", ["bash", str(BUILD_SCRIPT), *arguments], os.environ | {"PYTHON": sys.executable})


def build_parser() -> Parser:
    """Build the parser, which checks the flags and explains them."""
    parser, switch = Parser(prog="horovod-volo build-horovod", description=__doc__), "store_true"
    parser.add_argument("--install", action=switch, help="install the wheel, in place of any other Horovod")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--nccl", action=switch, help="for GPUs; the default where there is one")
    kinds.add_argument("--cpu", action=switch, help="for ranks on CPUs; the default with PyTorch's CPU build")
    parser.add_argument("--cc", help="compute capabilities of the GPUs (default: those here, else 80,90)")
    parser.add_argument(
        "--without-mpi", action=switch, help="leave MPI out: ranks start with horovodrun --gloo"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
