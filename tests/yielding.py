"""Lets ranks that wait in Open MPI sleep between two looks, and not only yield their core.

Open MPI waits in a loop of sched_yield. Linux 6.18 was seen to run such loops of several ranks on two cores
and nothing else, for two minutes; its log then says "rcu_preempt kthread starved". All programs that the
tests start get a sched_yield that sleeps.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

MICROSECONDS = 50
_SOURCE = f"""
#include <time.h>
int sched_yield(void) {{
    struct timespec pause = {{0, {MICROSECONDS} * 1000}};
    nanosleep(&pause, 0);
    return 0;
}}
"""
_folders: list[Path] = []


def pytest_configure() -> None:
    """Compile it, and have it loaded before all other libraries; workers of pytest inherit that."""
    compiler = shutil.which("cc")
    if not compiler or "LD_PRELOAD" in os.environ:
        return
    _folders.append(Path(tempfile.mkdtemp(prefix="yielding_")))
    library = _folders[0] / "sched_yield.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    if subprocess.run(command, input=_SOURCE, text=True, check=False).returncode == 0:
        os.environ["LD_PRELOAD"] = str(library)


def pytest_unconfigure() -> None:
    """Remove the library."""
    for folder in _folders:
        os.environ.pop("LD_PRELOAD", None)
        shutil.rmtree(folder, ignore_errors=True)
    _folders.clear()
