"""`--profile` on two ranks: traces of both with Horovod's timeline, words in the log, the same weights."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.runs import assert_same_state, records, start


def read(file: Path) -> list[dict]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_steps_of_two_ranks_are_profiled(images, tmp_path):
    flags = ("--no-token-label", "--log-every", "1")
    timeline = str(tmp_path / "timeline.json")
    profile = ("--profile", "steps=2:3")
    shown = start(images, tmp_path / "profiled", *flags, *profile, stop_at=4, HOROVOD_TIMELINE=timeline)
    assert "profile: A step took " in shown, shown
    assert "To change first: " in shown
    folder = tmp_path / "profiled" / "run" / "profile" / "steps_2-3"
    ranks = read(folder / "ranks.json.gz")
    assert [event["pid"] for event in ranks if event.get("name") == "step"] == [0, 0, 1, 1]
    blocks = {event["name"] for event in ranks if event["pid"] == 1 and event["ph"] == "X"}
    assert {"network.0.0 Block", "post_network.1 ClassBlock", "exchange"} <= blocks
    messages = [event["args"]["name"] for event in ranks if "Horovod: " in str(event.get("args"))]
    assert any("bucket" in name for name in messages)
    operators = {event["name"] for event in read(folder / "rank0.json.gz") if "name" in event}
    assert {"aten::mm", "network.0.0 Block", "forward and backward"} <= operators
    assert (folder / "summary.txt").read_text().strip() in shown
    # A log point has the times of its steps, also where a profile begins or ends.
    assert [record["step_seconds_min"] > 0 for record in records(tmp_path / "profiled")] == [True] * 4

    start(images, tmp_path / "plain", *flags, stop_at=4)
    assert_same_state(tmp_path / "plain", tmp_path / "profiled")
