"""Functions that run the trainer and measure its CPU time, and weights of runs and of timm's models."""

import resource
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from horovod_volo.models.build import build_model
from horovod_volo.models.weights_header import header_of
from horovod_volo.train import main
from tests.documents import ROOT
from tests.ranks.forking import path_of_forks
from tests.ranks.launching import run, train

TRAIN_IMAGES, HELD_OUT_IMAGES = 40, 20  # of the demo set `images` of tests/conftest.py


class EntryResult(NamedTuple):
    """Exit status, output and CPU time of a run of the trainer."""

    status: int
    output: str  # of standard output and standard error
    cpu_seconds: float  # of the run alone


def run_entry(*arguments: str) -> EntryResult:
    """Run `python -m horovod_volo.train` in an interpreter of its own, as users do."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = train(*arguments, ranks=1, start_with="none", plain=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return EntryResult(done.returncode, done.stdout, seconds)


def run_here(*arguments: str, streams: pytest.CaptureFixture[str]) -> EntryResult:
    """Run the trainer's main function in this process, without the time of imports."""
    streams.readouterr()
    before = time.process_time()
    status = main(list(arguments))
    seconds = time.process_time() - before
    printed = streams.readouterr()
    return EntryResult(status, printed.out + printed.err, seconds)


def shell(command: str, folder: Path, *, status: int = 0, seconds: int = 200, **extra: str) -> str:
    """Run a command of a document in a folder, its programs in forks; return what it prints."""
    prepare = f"cd {shlex.quote(str(folder))} && source {shlex.quote(str(ROOT / 'tools/activate'))}"
    prepare += f" && PATH={shlex.quote(path_of_forks())}"
    done = run(["bash", "-c", f"{prepare} && {command}"], seconds=seconds, **extra)
    assert done.returncode == status, f"{command}\n{done.stdout}"
    return done.stdout


# Runs the commands of the lines of stdin, one after the other, without the packages in its arguments. An
# editable installation would find what a copy of the package lacks.
_PROGRAM = """
import runpy, shlex, sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
sys.modules.update(dict.fromkeys(sys.argv[1:]))
for line in sys.stdin:
    print("$", line, end="", flush=True)
    sys.argv[1:] = shlex.split(line)
    try:
        runpy.run_module("horovod_volo", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        print("status", ended.code or 0, flush=True)
"""


def run_in_one_process(
    folder: Path, *commands: str, blocked: Sequence[str] = (), package: Path = ROOT, **environment: str
) -> dict[str, str]:
    """Run commands of horovod-volo in a folder, without some packages; return what each printed."""
    lines = folder / "commands.txt"
    lines.write_text("\n".join(commands) + "\n")
    command = f"cd {folder} && {shlex.join([sys.executable, '-c', _PROGRAM, *blocked])} < {lines}"
    # With LD_PRELOAD a command ends as Python does, which the program above keeps from ending.
    done = run(["bash", "-c", command], seconds=240, PYTHONPATH=str(package), LD_PRELOAD="", **environment)
    printed = dict(part.split("\n", 1) for part in done.stdout.split("$ ")[1:])
    assert list(printed) == list(commands), done.stdout
    return printed


def files_under(folder: Path) -> dict[str, tuple[int, int]]:
    """Return sizes and modification times of all files in a folder."""
    found = sorted(folder.rglob("*"))
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in found}


def save_run(
    folder: Path, name: str = "volo_demo", *, side: int = 64, names: Sequence[str] = tuple("0123456789")
) -> Path:
    """Write a run folder of random weights, `last` with averages too, and beside it weights.pth, without."""
    torch.manual_seed(0)
    state = build_model(name, img_size=side, num_classes=len(names), drop_path=0.0).state_dict()
    state["head.weight" if "head.weight" in state else "fc.weight"].normal_()  # else one class is predicted
    for checkpoint in (folder / "checkpoints" / "best", folder / "checkpoints" / "last"):
        checkpoint.mkdir(parents=True)
        save_file(state, checkpoint / "model.safetensors", metadata=header_of(list(names)))
    save_file({key: 2 * tensor for key, tensor in state.items()}, checkpoint / "ema.safetensors")
    (folder / "resolved.toml").write_text(f'[model]\nmodel = "{name}"\nimg_size = {side}\n')
    torch.save(state, folder.with_name("weights.pth"))
    return folder


def publish(cache: Path, name: str, state: Mapping[str, torch.Tensor]) -> None:
    """Put the weights of a model of timm into a cache of the hub, as a download does."""
    folder = cache / f"models--timm--{name}"
    blob, link = folder / "blobs" / "0", folder / "snapshots" / ("0" * 40) / "model.safetensors"
    for parent in (folder / "refs", blob.parent, link.parent):
        parent.mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    save_file(dict(state), blob)
    link.symlink_to(blob)
