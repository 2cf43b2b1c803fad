"""Starts the fork server when the first test wants a rank, and ends it with the tests."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.ranks.fork_server import OF_THE_SERVER

ROOT = Path(__file__).parents[2]


def fork() -> list[str]:
    """Return the words that have the fork server run the program behind them."""
    if Path("/dev/nvidiactl").exists():  # what CUDA's libraries begin when they are loaded ends at a fork
        return [sys.executable]
    # Its few imports are the standard library's: no site-packages, and none of their start-up files.
    return [sys.executable, "-IS", str(ROOT / "tests/ranks/forked_rank.py"), _server()]


@cache
def _server() -> str:
    """Start the server; return its socket."""
    folder = Path(tempfile.mkdtemp(prefix="forks_"))  # short: a socket's path may have 107 characters
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with (folder / "problems").open("w") as problems:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.fork_server", str(folder / "socket")],
            cwd=ROOT,
            env=os.environ | OF_THE_SERVER,
            stdin=subprocess.PIPE,  # its end is the server's
            stdout=subprocess.PIPE,
            stderr=problems,
            text=True,
            start_new_session=True,
        )
    atexit.register(server.wait)  # so that its CPU time is of the tests
    atexit.register(server.kill)
    assert server.stdout is not None
    if server.stdout.readline() != "ready\n":
        raise RuntimeError(f"the fork server did not start: {(folder / 'problems').read_text()}")
    return str(folder / "socket")
