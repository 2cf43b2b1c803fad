"""What the entry is tried on: a small set of images, and the entry itself with a look at its cost."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from horovod_volo.data.demo.demo_set import make_demo_set
from horovod_volo.train import main
from tests.ranks.launching import train

TRAIN_IMAGES, HELD_OUT_IMAGES = 40, 20


@dataclass(frozen=True)
class Ended:
    """How a run of the entry ended."""

    status: int
    output: str  # of both streams
    cpu_seconds: float  # its own, whatever else the machine does meanwhile

    @property
    def lines(self) -> list[str]:
        """What was said, line by line."""
        return self.output.splitlines()


def run_entry(*arguments: str, ranks: int = 1, start_with: str = "none") -> Ended:
    """Run `python -m horovod_volo.train` as its users do, in interpreters that import all they need."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = train(*arguments, ranks=ranks, start_with=start_with, plain=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(done.returncode, done.stdout, seconds)


def run_here(*arguments: str, streams: pytest.CaptureFixture[str]) -> Ended:
    """Run the entry's function in this process, which has already paid for its imports."""
    streams.readouterr()
    before = time.process_time()
    status = main(list(arguments))
    seconds = time.process_time() - before
    said = streams.readouterr()
    return Ended(status, said.out + said.err, seconds)


@pytest.fixture(scope="session")
def demo_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a demo set of a few images."""
    folder = tmp_path_factory.mktemp("data") / "demo"
    make_demo_set(folder, train=TRAIN_IMAGES, val=HELD_OUT_IMAGES)
    return folder
