"""Requirements of these tests that a machine may lack, root and Debian packages; the emulated hosts.

Without them the tests are skipped with a message that names them; with CI=true they fail.
"""

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.cluster.hosts import PATH, EmulatedNetwork, network

# Programs and their Debian packages.
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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `needs(PROGRAM, ...)` if it cannot run, except in CI, where it fails."""
    programs = [program for marker in item.iter_markers("needs") for program in marker.args]
    packages = sorted({PACKAGES[name] for name in programs if shutil.which(name, path=PATH) is None})
    reason = f"apt-get install --no-install-recommends {' '.join(packages)}" if packages else ""
    if programs and os.getuid() != 0:
        reason = "makes hosts and daemons, which needs root"
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="module")
def hosts() -> Iterator[EmulatedNetwork]:
    with network(4) as made:
        yield made


@pytest.fixture
def net(hosts: EmulatedNetwork) -> Iterator[EmulatedNetwork]:
    """Return the hosts for one test; restore their links and end their processes afterwards."""
    yield hosts
    hosts.restore()
