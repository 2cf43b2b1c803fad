"""The Python interface on two ranks: the same lines, callbacks on all ranks, one message for an error."""

from pathlib import Path

from horovod_volo.data.demo.demo_set import make_demo_set
from tests.ranks.launching import ranks_of


def test_two_ranks_train_with_callbacks_and_data_sets(tmp_path: Path) -> None:
    make_demo_set(tmp_path / "images", train=40, val=21)  # 21 images of 2 ranks: one more on a rank
    out = tmp_path / "out"
    ranks = ranks_of("trainer", out, str(tmp_path / "images"), ranks=2, start_with="gloo")

    # 40 images, 4 on each of 2 ranks: 5 steps an epoch.
    steps = [("step_done", step) for step in range(1, 11)]
    points = [("started", 0), *steps[:5], ("logged", 5), ("evaluated", 5)]
    points += [*steps[5:], ("logged", 10), ("evaluated", 10), ("ended True", 10)]
    for rank in ranks:
        assert rank["points"] == points
        assert rank["finished"]
        assert rank["first"]["images"] == 21
        # Files and the bytes of the same files, in the same order, are the same training to the last bit.
        assert rank["second"] == rank["first"]
        assert rank["evaluated"]["top1"] == rank["first"]["top1"]
        assert rank["evaluated"]["images"] == 21

        expected = "The callback FailsOnRank failed in step_done: KeyError: 'no such layer' ("
        assert rank["message"].startswith(expected)
        assert rank["message"].endswith("Correct it, or leave it out. (seen on rank 1 of 2)")
        assert rank["saved"] == ["step_00000003"]  # the ranks agree on the stop in the next step
    assert [rank["cause"] for rank in ranks] == ["NoneType", "KeyError"]
