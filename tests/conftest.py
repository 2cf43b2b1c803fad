"""The order of the tests, settings for several pytest workers on one machine, and images for all."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from horovod_volo.demo.demo_set import make_demo_set

HERE = Path(__file__).parent
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# A shell ignores SIGINT for commands in the background, and nohup SIGHUP: all that they start would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Published weights are missing, and at once; the hub's client reads this when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_CACHE="/nonexistent")
# One worker runs a file, in this order: long tests first, so that all workers end at about the same time.
LONG_FIRST = ("experiments", "cluster", "ranks", "faults", "smoke", "gpu", "published")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --long, --soak and --install, for tests that take minutes each."""
    parser.addoption("--long", action="store_true", help="also run tests/experiments/test_on_drawn_shapes.py")
    parser.addoption("--soak", action="store_true", help="also run tests of many faults")
    parser.addoption("--install", action="store_true", help="also install into clean environments")


def pytest_configure() -> None:
    """Compute on one thread if there are several workers."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _restore_process() -> Iterator[None]:
    """Undo what a run in this process sets, because later tests launch ranks, which inherit it."""
    before, handlers = dict(os.environ), {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    for number, handler in handlers.items():
        if handler is not None:  # None: not installed by Python
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def demo_images(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Return a function that makes a demo set of so many training and held-out images, once."""

    @cache
    def make(train: int, val: int) -> Path:
        folder = tmp_path_factory.mktemp("images") / f"{train}_{val}"
        make_demo_set(folder, train=train, val=val)
        return folder

    return make


@pytest.fixture(scope="session")
def images(demo_images: Callable[[int, int], Path]) -> Path:
    """Make a demo set of 40 training images, for five steps of eight, and of 20 held-out ones."""
    return demo_images(40, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the folders of long tests first; the order within a folder does not change."""
    items.sort(key=lambda item: _place(item.path))
    for name, reason in (("soak", "many faults, for minutes"), ("install", "installs for minutes")):
        if not config.getoption(f"--{name}"):
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(pytest.mark.skip(reason=f"{reason}: add --{name}"))


def _place(file: Path) -> int:
    folder = file.relative_to(HERE).parts[0]
    return LONG_FIRST.index(folder) if folder in LONG_FIRST else len(LONG_FIRST)
