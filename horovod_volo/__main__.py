"""The command `horovod-volo NAME ...`, which is `python -m horovod_volo.NAME ...`; without a name, a list.

horovod-volo train DATA_DIR --recipe volo_d1
horovodrun -np 8 horovod-volo evaluate DATA_DIR --weights runs/volo_d1
"""

import runpy
import sys
from argparse import ArgumentParser
from importlib import import_module

from horovod_volo.core.errors import MISTAKE, print_error
from horovod_volo.core.names import nearest

COMMANDS = {
    "train": "train a network on one rank or many, or print what that would be (--dry-run)",
    "evaluate": "exact metrics of a trained network",
    "predict": "the classes of images, by a trained network",
    "export": "write a trained network for timm, ONNX or mmsegmentation",
    "report": "write a page about runs: curves, speed, settings, worst classes",
    "labels": "import, generate, verify and show token labels",
    "pack": "pack images, or images with masks, into shards",
    "doctor": "check an installation, its hosts and the network between them",
    "build-horovod": "build and install the Horovod that several ranks need",
    "bench": "measure speed, memory and learning",
}
DONE = 0
_HELP = """horovod-volo COMMAND ...

{}

--help after a command lists its flags; --version prints the version, the doctor those of what is used.
On several ranks: horovodrun -np RANKS horovod-volo COMMAND ..., for train and evaluate also --ranks RANKS"""


def main() -> int:
    """Run the named command as its module; return the exit status if there is none to run."""
    name = sys.argv[1].replace("_", "-") if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]  # what is left is what `python -m` would have
        runpy.run_module(f"horovod_volo.{name.replace('-', '_')}", run_name="__main__", alter_sys=True)
    elif name == "--version":
        metadata = import_module("importlib.metadata")  # here, as it is slow to import
        print(f"horovod_volo {metadata.version('horovod_volo')}")
    elif name in ("--help", "-h"):
        print(_HELP.format("\n".join(f"  {name:<15}{text}" for name, text in COMMANDS.items())))
    else:
        known = f"{nearest(name, list(COMMANDS))} One of: {', '.join(COMMANDS)}."
        print_error(f"error: there is no command {name!r}.{known}")
        return MISTAKE
    return DONE


def build_parser() -> ArgumentParser:
    """Build one parser of all commands, from which shtab writes completions for a shell."""
    parser = ArgumentParser("horovod-volo")
    commands = parser.add_subparsers()
    homes = {"train": "config.command_line", "report": "report.__main__", "doctor": "doctor.__main__"}
    for name, help in COMMANDS.items():
        if name != "bench":  # its commands parse on their own
            module = homes.get(name, name.replace("-", "_"))
            flags = import_module(f"horovod_volo.{module}").build_parser()
            commands.add_parser(name, parents=[flags], add_help=False, help=help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
