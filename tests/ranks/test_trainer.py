"""The Python interface on two ranks: the same lines, callbacks on all ranks, one message for an error."""

import hashlib
from pathlib import Path

from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.pack import main as pack
from tests.range_server import serving
from tests.ranks.launching import ranks_of


def test_two_ranks_train_with_callbacks_and_data_sets(tmp_path: Path) -> None:
    make_demo_set(tmp_path / "images", train=40, val=21)  # 21 images of 2 ranks: one more on a rank
    out = tmp_path / "out"
    assert pack([str(tmp_path / "images"), str(tmp_path / "shards"), "--shard-images", "16"]) == 0
    with serving(tmp_path / "shards") as server:
        ranks = ranks_of("trainer", out, str(tmp_path / "images"), server.address, ranks=2, start_with="gloo")
        shard_bytes = sum(file.stat().st_size for file in (tmp_path / "shards" / "train").glob("*.tar"))
        assert server.bytes_of(".tar") <= shard_bytes + 2 * 3  # ranks share blocks; a byte for each version
        assert [path for path, *_ in server.requests].count("/train/images.catalog") == 1

    # 40 images, 4 on each of 2 ranks: 5 steps an epoch.
    steps = [("step_done", step) for step in range(1, 11)]
    points = [("started", 0), *steps[:5], ("logged", 5), ("evaluated", 5)]
    points += [*steps[5:], ("logged", 10), ("evaluated", 10), ("ended True", 10)]
    for rank in ranks:
        assert rank["points"] == points
        assert rank["finished"]
        assert rank["first"]["images"] == 21
        # Files and the bytes of the same files, in the same order, are the same training to the last bit.
        assert rank["second"] | {"hours": rank["first"]["hours"]} == rank["first"]
        assert rank["evaluated"]["top1"] == rank["first"]["top1"]
        assert rank["evaluated"]["images"] == 21

        # Ranks agree on the stop in the next step, or in the evaluation that comes before it.
        saved = {"started": [], "step_done": [3], "logged": [5], "evaluated": [5], "ended": [5, 10]}
        assert rank["failures"].keys() == saved.keys()
        for point, (message, cause, _, steps) in rank["failures"].items():
            assert message.startswith(
                f"The callback FailsOnRank failed in {point}: KeyError: 'no such layer' ("
            )
            assert message.endswith("Correct it, or leave it out. (seen on rank 1 of 2)")
            assert steps == [f"step_{step:08}" for step in saved[point]]
            assert cause == ("KeyError" if rank is ranks[1] else "NoneType")
    for point in ranks[1]["failures"]:
        (_, _, innocent, _), (_, _, guilty, _) = (rank["failures"][point] for rank in ranks)
        assert innocent == ""
        assert guilty.startswith(f"error on rank 1: The callback FailsOnRank failed in {point}: KeyError")
        assert guilty.count("Traceback (most recent call last)") == guilty.count("in _fail") == 1
        assert "KeyError" in (out / point / "log.txt").read_text()
    local = build_catalog(str(tmp_path / "shards"), "train", None)
    expected_shards = [hashlib.sha256(local.read(index)).hexdigest() for index in range(len(local))]
    assert [rank["digest"] for rank in ranks] == [local.digest] * 2
    assert [text for _, text in sorted(pair for rank in ranks for pair in rank["shards"])] == expected_shards
