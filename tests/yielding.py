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

import pytest

MICROSECONDS = 50
_SOURCE = f"""
#include <time.h>
int sched_yield(void) {{
    struct timespec pause = {{0, {MICROSECONDS} * 1000}};
    nanosleep(&pause, 0);
    return 0;
}}
"""


def pytest_configure(config: pytest.Config) -> None:
    """Compile it, and have it loaded before all other libraries; workers of pytest inherit that."""
    compiler = shutil.which("cc")
    if not compiler or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    folder = tempfile.TemporaryDirectory(prefix="yielding_")
    config.add_cleanup(folder.cleanup)
    library = f"{folder.name}/sched_yield.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    if subprocess.run(command, input=_SOURCE, text=True, check=False).returncode == 0:
        os.environ["LD_PRELOAD"] = f"{library} {os.environ.get('LD_PRELOAD', '')}".strip()
