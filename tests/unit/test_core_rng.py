"""Counter-based random numbers never change, are uniform, and are independent for different counters."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import numpy as np
import pytest

import horovod_volo
from horovod_volo.core.rng import Purpose, philox, random_bits, uniforms, uniforms_of_samples

PACKAGE = Path(horovod_volo.__file__).parent
# torch's generator draws initial weights, example inputs and drop path of timm's networks; the demo set and
# modules that do not train have generators of their own. core/rng.py builds all generators of training.
OTHER_SOURCES = {"core/rng.py", "engine/state.py", "models/precision.py", "kernels/choice.py"}
OTHER_SOURCES |= {"models/build.py", "models/timm_export.py"}
FOLDERS_OF_OTHER_SOURCES = ("bench", "demo", "doctor")


def assert_independent(name: str, first: np.ndarray, second: np.ndarray) -> None:
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 4 / np.sqrt(first.size), name
    # Uncorrelated numbers may be dependent: the pairs must also be uniform on the square.
    counts = np.histogram2d(first.ravel(), second.ravel(), bins=4, range=[(0, 1), (0, 1)])[0]
    chi_squared = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi_squared < 15 + 5 * np.sqrt(2 * 15), name


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
    assert philox(Purpose.SAMPLE_ORDER, 42, 0).random_raw(2).tolist() == [
        9682593722721497799,
        10451204766555218813,
    ]


def test_numbers_are_uniform() -> None:
    values = uniforms_of_samples(10, Purpose.CROP_FLIP, 2, 3, np.arange(20000)).ravel()
    assert values.min() >= 0
    assert values.max() < 1
    deviation = np.sqrt(1 / 12 / len(values))
    assert abs(values.mean() - 1 / 2) < 4 * deviation
    assert abs(values.var() - 1 / 12) < 4 * np.sqrt(1 / 180 / len(values))
    counts = np.histogram(values, bins=256, range=(0, 1))[0]
    chi_squared = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert abs(chi_squared - 255) < 4 * np.sqrt(2 * 255)


def test_numbers_of_neighbouring_counters_are_independent() -> None:
    def drawn(seed: int, epoch: int) -> np.ndarray:
        return uniforms_of_samples(10, Purpose.CROP_FLIP, seed, epoch, np.arange(20000))

    values = drawn(2, 3)
    assert_independent("sample", values[1:], values[:-1])
    assert_independent("draw", values[:, 1:], values[:, :-1])
    assert_independent("epoch", values, drawn(2, 4))
    assert_independent("seed", values, drawn(3, 3))
    assert_independent("seed and epoch exchanged", values, drawn(3, 2))


def test_one_bit_of_any_input_changes_half_of_the_bits() -> None:
    base = (Purpose.CROP_FLIP, 42, 7, 11)
    for word, bit in itertools.product(range(4), range(0, 40, 3)):
        flips = []
        for sample in range(200):
            inputs = [*base[:3], sample]
            changed = list(inputs)
            changed[word] ^= 1 << bit
            flips.append((random_bits(*inputs) ^ random_bits(*changed)).bit_count())
        assert abs(np.mean(flips) - 64 / 2) < 5 * np.sqrt(64 / 4 / 200), (word, bit)


def test_counters_are_not_concatenated() -> None:
    counters = [(1, 23), (12, 3), (123,), (1, 2, 3), (-1, 23), (1, -23)]
    assert len({random_bits(Purpose.DROP_PATH, *each) for each in counters}) == len(counters)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(Purpose, 2)))
def test_no_two_purposes_share_a_stream(first: Purpose, second: Purpose) -> None:
    assert first.value != second.value
    samples = np.arange(2000)
    drawn = [uniforms_of_samples(10, purpose, 0, 0, samples) for purpose in (first, second)]
    assert not set(drawn[0].ravel()) & set(drawn[1].ravel())
    assert_independent(f"{first.name} and {second.name}", *drawn)
    words = [set(philox(purpose, 0, 0).random_raw(1000).tolist()) for purpose in (first, second)]
    assert not words[0] & words[1]


def test_each_purpose_has_one_user() -> None:
    users: dict[str, list[str]] = {purpose.name: [] for purpose in Purpose}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "Purpose":
                users[node.attr].append(file.name)
    assert {name: len(files) for name, files in users.items()} == dict.fromkeys(users, 1)


def test_no_other_module_seeds_a_generator() -> None:
    seeding = {"SeedSequence", "default_rng", "manual_seed", "RandomState", "Philox", "Generator"}
    found = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in seeding
    }
    assert {file for file in found if not file.startswith(FOLDERS_OF_OTHER_SOURCES)} == OTHER_SOURCES
