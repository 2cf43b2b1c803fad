"""The benchmark of gradient exchange on two ranks: all methods lead to the same weights, and are measured."""

from __future__ import annotations

import json

import pytest

from tests.ranks.launching import launcher, python, run

SIZE = ("--model", "volo_demo", "--img-size", "32", "--batch-size", "2", "--pairs", "2")


def test_the_hidden_fraction_follows_from_the_measured_times():
    command = [*launcher("mpi", 2), *python(), "-m", "horovod_volo.bench", "reduce", "--json", *SIZE]
    done = run(command, seconds=240)
    assert done.returncode == 0, done.stdout
    line = next(line for line in done.stdout.splitlines() if '"figures"' in line)
    value = {figure["label"]: figure["value"] for figure in json.loads(line)["figures"]}
    hideable = min(value["backward"], value["our exchange by itself"])
    assert value["hidden of our exchange"] == pytest.approx(100 * (1 - value["ours: exposed"] / hideable))
    assert value.keys() >= {f"{name}: exposed" for name in ("torch DDP", "stock Horovod", "after backward")}
    assert value["our messages a step"] > 1
