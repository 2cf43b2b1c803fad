"""Horovod's collectives and the reducer on tensors of a device.

NCCL needs one GPU per rank, and the test machines have one GPU, so there is one rank. This shows that Horovod
is built for the device; tests/ranks shows on the CPU that sums over ranks are correct.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch


def test_one_rank_through_horovod(device: torch.device) -> None:
    horovodrun = Path(sys.executable).with_name("horovodrun")
    script = Path(__file__).with_name("one_rank_of_horovod.py")
    command = [horovodrun, "--gloo", "-np", "1", sys.executable, script, str(device)]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [line for line in done.stdout.splitlines() if "{" in line]
    assert json.loads(printed[-1][printed[-1].index("{") :]) == {
        "torch.float16": [0.0, 0.5, 1.0, 1.5],
        "torch.float32": [0.0, 0.5, 1.0, 1.5],
        "torch.float64": [0.0, 0.5, 1.0, 1.5],
        "broadcast": [1.5, -2.0],
        "total": [2.0, 3.0],
        "gather": ["rank 0"],
        "built for the device": True,
        "gradients": True,
    }
