"""A step has the same images, crops, flips and labels on any number of ranks."""

from collections import Counter

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import ranks_of

GLOBAL_BATCH, IMAGES = 6, 40
STEPS = IMAGES // GLOBAL_BATCH


def test_one_two_and_three_ranks_have_the_same_samples(tmp_path):
    make_demo_set(tmp_path / "set", train=IMAGES, val=10)
    samples = {}
    for ranks, start_with in ((1, "none"), (2, "gloo"), (3, "mpi")):
        arguments = (str(tmp_path / "set"), str(GLOBAL_BATCH))
        found = ranks_of("samples", tmp_path / f"{ranks}", *arguments, ranks=ranks, start_with=start_with)
        samples[ranks] = Counter(tuple(entry) for rank in found for entry in rank["entries"])
    assert len(samples[1]) == 2 * STEPS * GLOBAL_BATCH
    assert samples[1] == samples[2] == samples[3]
    for epoch in (0, 1):
        indices = [entry[1] for entry in samples[1] if entry[0].startswith(f"epoch {epoch} ")]
        assert len(set(indices)) == len(indices) == STEPS * GLOBAL_BATCH
    pixels = {entry[0].split()[1]: {} for entry in samples[1]}
    for where, index, digest, *_ in samples[1]:
        pixels[where.split()[1]][index] = digest
    in_both_epochs = pixels["0"].keys() & pixels["1"].keys()
    assert all(pixels["0"][index] != pixels["1"][index] for index in in_both_epochs), (
        "the second epoch repeats a crop"
    )
