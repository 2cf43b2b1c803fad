"""What these tests need that a machine may lack: root, and Debian packages.

Where it is missing they skip and say what to install; where CI=true, that is a failure.
"""

from __future__ import annotations

import os
import shutil

import pytest

# Program, and the Debian package that brings it.
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "unshare": "util-linux",
}
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def lacking(*programs: str) -> str:
    """Say what keeps a test that wants these programs, and root, from running here."""
    if os.getuid() != 0:
        return "makes hosts and daemons, which takes root"
    packages = sorted({PACKAGES[name] for name in programs if shutil.which(name, path=PATH) is None})
    return f"apt-get install --no-install-recommends {' '.join(packages)}" if packages else ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `needs(PROGRAM, ...)` where it cannot run, but never in CI."""
    for marker in item.iter_markers("needs"):
        if reason := lacking(*marker.args):
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
