"""Runs tests of Triton kernels in a process that interprets them: Triton decides at its first import."""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def skip_elsewhere(device: torch.device) -> None:
    """Skip a test of kernels in a process in which they do not run on the device."""
    if (device.type == "cpu") != INTERPRETED:
        pytest.skip("runs in the interpreter's process" if device.type == "cpu" else "runs compiled")


def run_in_interpreter(files: list[str], tests: int, keyword: str) -> None:
    """Run this many tests of files, those that `keyword` selects, in one process of the interpreter."""
    if INTERPRETED:
        pytest.skip("this is the interpreter's process")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", keyword, *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{tests} passed" in found.stdout, found.stdout
