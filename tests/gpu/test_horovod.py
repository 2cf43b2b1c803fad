"""Horovod's collectives and the reducer on tensors of a device.

NCCL needs one GPU per rank, and the test machines have one GPU, so there is one rank. This shows that Horovod
is built for the device; tests/ranks shows on the CPU that sums over ranks are correct.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.ranks.launching import launcher, python, run


def test_one_rank_through_horovod(device: torch.device) -> None:
    script = str(Path(__file__).with_name("one_rank_of_horovod.py"))
    done = run([*launcher("gloo", 1), *python(), script, str(device)], seconds=180)
    assert done.returncode == 0, done.stdout
    assert "all agree" in done.stdout
