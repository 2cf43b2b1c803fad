"""A small set of images, and functions that run the trainer and measure its CPU time."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.train import main
from tests.ranks.launching import train

TRAIN_IMAGES, HELD_OUT_IMAGES = 40, 20


@dataclass(frozen=True)
class EntryResult:
    """Exit status, output and CPU time of a run of the trainer."""

    status: int
    output: str  # of standard output and standard error
    cpu_seconds: float  # of the run alone

    @property
    def lines(self) -> list[str]:
        """The lines of the output."""
        return self.output.splitlines()


def run_entry(*arguments: str, ranks: int = 1, start_with: str = "none") -> EntryResult:
    """Run `python -m horovod_volo.train` in interpreters of its own, as users do."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = train(*arguments, ranks=ranks, start_with=start_with, plain=True)
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


@pytest.fixture(scope="session")
def demo_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a demo set of a few images."""
    folder = tmp_path_factory.mktemp("data") / "demo"
    make_demo_set(folder, train=TRAIN_IMAGES, val=HELD_OUT_IMAGES)
    return folder
