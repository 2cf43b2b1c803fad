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


def test_others_than_root_are_told(monkeypatch):
    monkeypatch.setattr(conftest.os, "getuid", lambda: 1000)
    assert "takes root" in conftest.lacking("slurmctld")


def test_nothing_is_said_where_all_is_there(monkeypatch):
    monkeypatch.setattr(conftest.os, "getuid", lambda: 0)
    monkeypatch.setattr(conftest.shutil, "which", lambda name, path: f"/usr/sbin/{name}")
    conftest.pytest_runtest_setup(ITEM)
