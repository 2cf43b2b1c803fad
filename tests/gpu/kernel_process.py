"""Runs tests of Triton kernels in processes of their own: in the interpreter, and to compile them.

Triton chooses between compiling and interpreting when it is first imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def skip_elsewhere(device: torch.device) -> None:
    """Skip a test of kernels in a process in which they do not run on the device."""
    if (device.type == "cpu") != INTERPRETED:
        pytest.skip("runs in the interpreter's process" if device.type == "cpu" else "runs compiled")


def run_in_interpreter(file: str, tests: int, keyword: str = "cpu") -> None:
    """Run this many tests of a file, those whose names contain `keyword`, in the interpreter."""
    if INTERPRETED:
        pytest.skip("this is the interpreter's process")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", keyword, file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{tests} passed" in found.stdout, found.stdout


def check_compiled(module: str, kernels: int) -> None:
    """Compile the kernels of a module for three generations of GPUs: none spills registers."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "compile_kernels.py"), module]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == kernels * 3
    for line in lines:
        *_, registers, spilled = line.split()
        assert int(registers) <= 168, line  # so that a multiprocessor can run three programs of 128 threads
        assert int(spilled) == 0, line
