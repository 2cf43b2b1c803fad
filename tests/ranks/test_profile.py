"""What is measured on two ranks: profiles, which change no weights, and the benchmark of the exchange."""

import gzip
import json
import re
from collections import Counter

import pytest

from tests.ranks.launching import launcher, python, run
from tests.runs import assert_same_state, records, start


def test_steps_of_two_ranks_are_profiled(images, tmp_path):
    flags = ("--no-token-label", "--log-every", "1")
    shown = start(images, tmp_path / "profiled", *flags, "--profile", "steps=2:3", stop_at=4)
    assert "profile: A step took " in shown, shown
    assert "To change first: " in shown
    folder = tmp_path / "profiled" / "run" / "profile" / "steps_2-3"
    (slowest,) = re.findall(r"The slowest rank is (\d)", shown)
    for rank in {"0", slowest}:
        content = gzip.decompress((folder / f"rank{rank}.json.gz").read_bytes())
        names = Counter(event.get("name") for event in json.loads(content)["traceEvents"])
        assert names >= Counter({"forward and backward": 2, "exchange": 2, "update": 2, "aten::mm": 2})
        assert names["network.0.0 Block"] == names["post_network.1 ClassBlock"] == 2
    assert (folder / "summary.txt").read_text().strip() in shown
    # A log point has the times of its steps, also where a profile begins or ends.
    assert [record["step_seconds_min"] > 0 for record in records(tmp_path / "profiled")] == [True] * 4

    start(images, tmp_path / "plain", *flags, stop_at=4)
    assert_same_state(tmp_path / "plain", tmp_path / "profiled")


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
