"""`--profile` on two ranks: traces of both with Horovod's timeline, words in the log, the same weights."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from safetensors.torch import load_file

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import train

SMALL = (
    "--recipe demo --img-size 32 --batch-size 4 --epochs 2 --warmup-epochs 0 --no-token-label --log-every 1"
)
STOP = ("--stop-at-step", "4")


def read(file: Path) -> list[dict]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_steps_of_two_ranks_are_profiled(tmp_path: Path) -> None:
    images = tmp_path / "images"
    make_demo_set(images, train=40, val=20)
    where = (str(images), *SMALL.split(), "--output", str(tmp_path))
    profile = ("--profile", "steps=2:3", "--horovod-timeline", str(tmp_path / "timeline.json"))
    profiled = train(*where, "--name", "one", *profile, *STOP, ranks=2, start_with="gloo")
    assert "profile: A step took " in profiled.stdout, profiled.stdout
    assert "To change first: " in profiled.stdout
    folder = tmp_path / "one" / "profile" / "steps_2-3"
    ranks = read(folder / "ranks.json.gz")
    steps = [event for event in ranks if event.get("name") == "step"]
    assert [event["pid"] for event in steps] == [0, 0, 1, 1]
    blocks = {event["name"] for event in ranks if event["pid"] == 1 and event["ph"] == "X"}
    assert {"network.0.0 Block", "post_network.1 ClassBlock", "exchange"} <= blocks
    messages = [event["args"]["name"] for event in ranks if "Horovod: " in str(event.get("args"))]
    assert any("bucket" in name for name in messages)
    operators = {event["name"] for event in read(folder / "rank0.json.gz") if "name" in event}
    assert {"aten::mm", "network.0.0 Block", "forward and backward"} <= operators
    summary = (folder / "summary.txt").read_text()
    assert summary.strip() in profiled.stdout

    # A log point has the times of its steps, also where a profile begins or ends.
    lines = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step_seconds_min"] > 0 for line in lines] == [True] * 4

    plain = train(*where, "--name", "two", *STOP, ranks=2, start_with="gloo")
    assert plain.returncode, plain.stdout  # stopped
    weights = "checkpoints/last/model.safetensors"
    first, second = (load_file(tmp_path / name / weights) for name in ("one", "two"))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
