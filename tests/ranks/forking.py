"""Starts the fork server when a test first needs a rank, and ends it with the tests."""

import atexit
import configparser
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.ranks.fork_server import SERVER_ENVIRONMENT

ROOT = Path(__file__).parents[2]


def fork(socket: str = "") -> list[str]:
    """Return the command prefix that runs a Python program in a fork of a server, by default our own."""
    # CUDA's libraries cannot be used in a fork of a process that has loaded them.
    if Path("/dev/nvidiactl").exists():
        return [sys.executable]
    # It imports little, and nothing but the standard library, so it starts without site-packages.
    return [sys.executable, "-IS", str(ROOT / "tests/ranks/forked_rank.py"), socket or _server()]


@cache
def path_of_forks() -> str:
    """Return a PATH, set after tools/activate, on which our programs run in forks of the fork server."""
    folder, scripts = tempfile.mkdtemp(prefix="forked_programs_"), Path(sys.executable).parent
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    start = shlex.join(fork())
    programs = {
        "python": f'exec {start} "$@"',
        "horovodrun": f'exec {start} {shlex.quote(str(scripts / "horovodrun"))} "$@"',
        # The module of the command, because a fork has already imported most of them.
        "horovod-volo": f'command=$1\nshift\nexec {start} -m "horovod_volo.$command" "$@"',
    }
    for name, lines in programs.items():
        script = Path(folder, name)
        script.write_text(f"#!/bin/sh\n{lines}\n", encoding="utf-8")
        script.chmod(0o755)
    return f"{folder}:{scripts}:{os.environ['PATH']}"


@cache
def python_warnings() -> str:
    """Return pytest's filterwarnings as a value of PYTHONWARNINGS: warnings are errors in all processes.

    pytest applies its filters in its own process alone. Of a filter's fields the message is a regular
    expression in setup.cfg and literal text in PYTHONWARNINGS, which separates filters by commas.
    """
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    filters = setup["tool:pytest"]["filterwarnings"].split("\n")
    return ",".join(line for line in filters if line)


@cache
def _server() -> str:
    """Start the server and return the path of its socket."""
    # A short path, because that of a socket may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="forks_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with (folder / "stderr").open("w") as stderr:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.fork_server", str(folder / "socket")],
            cwd=ROOT,
            env=os.environ
            | SERVER_ENVIRONMENT
            | {"PYTHONWARNINGS": python_warnings(), "PYTHONUNBUFFERED": ""},
            stdin=subprocess.PIPE,  # the server ends when this is closed
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    atexit.register(server.wait)  # so that its CPU time counts as that of the tests
    atexit.register(server.kill)
    if server.stdout.readline() != "ready\n":
        raise RuntimeError(f"the fork server did not start: {(folder / 'stderr').read_text()}")
    return str(folder / "socket")
