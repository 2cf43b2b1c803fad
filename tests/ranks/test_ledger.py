"""A step has the same images, crops, flips and labels on any number of ranks."""

from collections import Counter

from horovod_volo.data.demo.demo_set import make_demo_set
from tests.ranks.launching import ranks_of

GLOBAL_BATCH, IMAGES = 6, 40
STEPS = IMAGES // GLOBAL_BATCH


def test_one_two_and_three_ranks_see_the_same(tmp_path):
    make_demo_set(tmp_path / "set", train=IMAGES, val=10)
    ledgers = {}
    for ranks, start_with in ((1, "none"), (2, "gloo"), (3, "mpi")):
        arguments = (str(tmp_path / "set"), str(GLOBAL_BATCH))
        found = ranks_of("ledger", tmp_path / f"{ranks}", *arguments, ranks=ranks, start_with=start_with)
        ledgers[ranks] = Counter(tuple(entry) for rank in found for entry in rank["entries"])
    assert len(ledgers[1]) == 2 * STEPS * GLOBAL_BATCH
    assert ledgers[1] == ledgers[2] == ledgers[3]
    for epoch in (0, 1):
        seen = [entry[1] for entry in ledgers[1] if entry[0].startswith(f"epoch {epoch} ")]
        assert len(set(seen)) == len(seen) == STEPS * GLOBAL_BATCH
    pixels = {entry[0].split()[1]: {} for entry in ledgers[1]}
    for where, index, digest, *_ in ledgers[1]:
        pixels[where.split()[1]][index] = digest
    shared = pixels["0"].keys() & pixels["1"].keys()
    assert all(pixels["0"][index] != pixels["1"][index] for index in shared), "an epoch repeats cuts"
