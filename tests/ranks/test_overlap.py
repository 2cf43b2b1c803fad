"""The benchmark of a slow network finishes on two ranks and leaves no processes or links."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from horovod_volo.bench.machine.reduce import measure_overlap
from horovod_volo.core.errors import UserError
from tests.ranks.launching import run

SIZE = ("--model", "volo_demo", "--img-size", "32", "--batch-size", "2", "--pairs", "2", "--link", "1000")
MAKES_NAMESPACES = os.geteuid() == 0 and all(map(shutil.which, ("setpriv", "unshare", "ip", "tc")))


def links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def rank_processes() -> list[Path]:
    """Return the rank processes that this benchmark has started."""
    arguments = b"\0".join(word.encode() for word in ("reduce", "--json", *SIZE[:4]))
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if arguments in content(path)]


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


@pytest.mark.skipif(
    not MAKES_NAMESPACES, reason="a network namespace needs root, setpriv, unshare, ip and tc"
)
def test_the_hidden_fraction_follows_from_the_measured_times() -> None:
    links_before = links()
    done = run([sys.executable, "-m", "horovod_volo.bench", "overlap", "--json", *SIZE], seconds=300)
    assert done.returncode == 0, done.stdout
    record = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    value = {figure["label"]: figure["value"] for figure in record["figures"]}
    hideable = min(value["backward"], value["our exchange by itself"])
    assert hideable > 0
    assert value["hidden of our exchange"] == pytest.approx(100 * (1 - value["ours: exposed"] / hideable))
    assert value.keys() >= {f"{name}: exposed" for name in ("torch DDP", "stock Horovod", "after backward")}
    # In fp16 22 Mbit at 1,000 Mbit/s; the token bucket of the link passes the first megabyte at once.
    assert value["our exchange by itself"] > 10
    assert links() == links_before
    assert rank_processes() == []


def test_one_error_names_all_missing_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"Missing: setpriv .* unshare .* ip .* tc .* root") as raised:
        measure_overlap(model="volo_demo", img_size=32, batch_size=2, link=1000, pairs=2)
    assert str(raised.value).count("\n") == 0
