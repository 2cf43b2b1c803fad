"""The worst classes are the same on any number of ranks."""

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import ranks_of


def test_confusions_do_not_depend_on_the_number_of_ranks(tmp_path):
    images = tmp_path / "images"
    make_demo_set(images, train=10, val=33)
    starts = {1: "none", 3: "gloo"}
    results = {
        ranks: ranks_of("confusions", tmp_path / str(ranks), str(images), ranks=ranks, start_with=start)
        for ranks, start in starts.items()
    }
    first = results[1][0]
    assert first["confusions"]["images"] == 33 - 6
    assert len(first["confusions"]["worst"]) > 5
    assert first["pictures"]["worst_confusions"].startswith(b"\x89PNG")
    assert all(of_rank == first for of_ranks in results.values() for of_rank in of_ranks)
