"""Counter-based random numbers never change; no two purposes or counters have the same ones."""

import ast
import itertools
from collections import Counter
from pathlib import Path

import numpy as np

import horovod_volo
from horovod_volo.core.rng import Purpose, philox, random_bits, uniforms, uniforms_of_samples

PACKAGE = Path(horovod_volo.__file__).parent
# torch's generator draws initial weights, example inputs and drop path of timm's networks; the demo set and
# modules that do not train have generators of their own. core/rng.py builds all generators of training.
OTHER_SOURCES = {
    "core/rng.py",
    "engine/state.py",
    "kernels/choice.py",
    "models/build.py",
    "models/timm_export.py",
}
FOLDERS_OF_OTHER_SOURCES = ("bench", "demo", "doctor")


def test_numbers_follow_the_formula_of_all_versions() -> None:
    def mixed(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    def hashed(*words: int) -> int:
        state = 0
        for word in words:
            state = mixed(((state ^ word) + 0x9E3779B97F4A7C15) % 2**64)
        return state

    purpose = Purpose.CROP_FLIP
    drawn = uniforms_of_samples(3, purpose, 2, 3, np.array([4, 2**40]))
    expected = [[(hashed(purpose, 2, 3, n, draw) >> 11) / 2**53 for draw in range(3)] for n in (4, 2**40)]
    assert drawn.tolist() == expected
    assert [uniforms(3, purpose, 2, 3, n) for n in (4, 2**40)] == expected
    assert random_bits(purpose, 2, 3) == hashed(purpose, 2, 3)
    assert purpose == 0x706C616E
    assert drawn[0, 0] == np.float64(0.5451634646666201)


def test_raw_words_of_philox_never_change() -> None:
    words = philox(Purpose.SAMPLE_ORDER, 42, 0).random_raw(2).tolist()
    assert words == [9682593722721497799, 10451204766555218813]


def test_no_two_purposes_share_a_stream() -> None:
    samples = np.arange(300)
    drawn = {purpose: uniforms_of_samples(10, purpose, 0, 0, samples) for purpose in Purpose}
    words = {purpose: set(philox(purpose, 0, 0).random_raw(300).tolist()) for purpose in Purpose}
    for first, second in itertools.combinations(Purpose, 2):
        assert not set(drawn[first].ravel()) & set(drawn[second].ravel())
        assert not words[first] & words[second]


def test_each_purpose_has_one_user_and_no_other_module_seeds_a_generator() -> None:
    seeding = {"SeedSequence", "default_rng", "manual_seed", "RandomState", "Philox", "Generator"}
    users, seeders = Counter[str](), set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                users.update([node.attr] if getattr(node.value, "id", "") == "Purpose" else [])
                seeders.update([file.relative_to(PACKAGE).as_posix()] if node.attr in seeding else [])
    assert users == dict.fromkeys(Purpose.__members__, 1)
    assert {file for file in seeders if not file.startswith(FOLDERS_OF_OTHER_SOURCES)} == OTHER_SOURCES
