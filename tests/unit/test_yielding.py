"""Programs that the tests start sleep when they yield their core."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.yielding import MICROSECONDS

TIMES = 1000
PROGRAM = f"""
import ctypes, time
began = time.monotonic()
for _ in range({TIMES}):
    ctypes.CDLL(None).sched_yield()
print(time.monotonic() - began)
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_yielding_sleeps() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(done.stdout) > TIMES * MICROSECONDS / 1e6
    assert not done.stderr
