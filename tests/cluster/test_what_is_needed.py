"""Without its requirements a cluster test is skipped and names them; in CI it fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.cluster import conftest

ITEM = SimpleNamespace(iter_markers=lambda name: [pytest.mark.needs("slurmctld", "munged", "slurmctld").mark])


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_missing_packages_are_named(ci, outcome, monkeypatch):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(conftest.os, "getuid", lambda: 0)
    monkeypatch.setattr(conftest.shutil, "which", lambda name, path: None)
    with pytest.raises(outcome, match=r"apt-get install --no-install-recommends munge slurmctld$"):
        conftest.pytest_runtest_setup(ITEM)


def test_root_is_needed_and_programs_that_are_there_are_enough(monkeypatch):
    monkeypatch.setattr(conftest.shutil, "which", lambda name, path: f"/usr/sbin/{name}")
    monkeypatch.setattr(conftest.os, "getuid", lambda: 1000)
    assert "needs root" in conftest.lacking("slurmctld")
    monkeypatch.setattr(conftest.os, "getuid", lambda: 0)
    conftest.pytest_runtest_setup(ITEM)
