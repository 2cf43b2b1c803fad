"""Data sets in memory: images, labels, classes, held-out samples, digests, and what is refused."""

from __future__ import annotations

import io
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_loaders import evaluated_images, train_loader
from PIL import Image

from horovod_volo.cluster.world import World
from horovod_volo.config.command_line import build_config
from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.engine.classification import Classification
from horovod_volo.engine.given_data import GivenData

ALONE, CONFIG = World.single(), build_config("", {})
RANDOM = np.random.default_rng(1)


def pixels(side: int = 12) -> np.ndarray[Any, Any]:
    return RANDOM.integers(0, 256, (side, side + 2, 3), dtype=np.uint8)


def png(image: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


class LabelledPictures:
    """LabelledPictures with further attributes, such as the names of the classes."""

    def __init__(self, samples: list[tuple[Any, Any]], **attributes: Any) -> None:
        self.samples, self.reads = samples, 0
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        return self.samples[index]


def lists(train: Any, val: Any = None, identity: str = "", **settings: Any) -> Any:
    return GivenData(train, val, identity).lists(build_config("", settings), ALONE)


def test_every_kind_of_an_image_gives_its_pixels(tmp_path: Path) -> None:
    image, gray = pixels(), pixels()[..., 0]
    (tmp_path / "image.png").write_bytes(png(image))
    kinds = [png(image), tmp_path / "image.png", str(tmp_path / "image.png"), Image.fromarray(image), image]
    kinds += [memoryview(png(image)), image[::-1][::-1], torch.from_numpy(image)]
    train, _ = lists([(each, 0) for each in kinds], [(image, 0)])
    batch = evaluated_images(train, Data(batch_size=4))
    assert all(each.equal(batch[0]) for each in batch)
    grays, _ = lists([(gray, 0), (gray[..., None], 0), (png(gray), 0)], [(gray, 0)])
    of_gray = evaluated_images(grays, Data(batch_size=4))
    assert all(each.equal(of_gray[0]) for each in of_gray)


def test_labels_are_numbers_or_names() -> None:
    image = pixels()
    named, held_out = lists([(image, "b"), (image, "a"), (image, "c")], [(image, "c"), (image, "a")])
    assert (named.classes, named.targets.tolist()) == (("a", "b", "c"), [1, 0, 2])
    assert (held_out.classes, held_out.targets.tolist()) == (("a", "b", "c"), [2, 0])
    numbered, _ = lists([(image, np.int64(7)), (image, 11), (image, torch.tensor(3))], [(image, 7)])
    assert (numbered.classes, numbered.targets.tolist()) == (("03", "07", "11"), [1, 2, 0])
    # The same classes in another order are matched by name.
    train = LabelledPictures([(image, 0), (image, 1)], classes=["ant", "bee"])
    other = LabelledPictures([(image, 0), (image, 1), (image, 0)], classes=["bee", "ant"])
    images, held_out = lists(train, other)
    assert (images.classes, images.targets.tolist()) == (("ant", "bee"), [0, 1])
    assert (held_out.classes, held_out.targets.tolist()) == (("ant", "bee"), [1, 0, 1])


def test_targets_save_reading_every_sample() -> None:
    samples = LabelledPictures(
        [(pixels(), number % 2) for number in range(20)], targets=[n % 2 for n in range(20)]
    )
    train, held_out = lists(samples)
    assert samples.reads == 2  # the first of each part
    assert train.targets.tolist().count(1) == 9
    assert (len(train), len(held_out)) == (18, 2)


def test_held_out_samples_follow_from_the_seed_and_are_a_share_of_each_class() -> None:
    samples = [(pixels(4), "ab"[number % 2]) for number in range(40)]
    parts = {seed: lists(samples, seed=seed, val_share=0.2) for seed in (1, 2)}
    for train, held_out in parts.values():
        assert np.bincount(held_out.targets).tolist() == [4, 4]
        names = [images.name(number) for images in (train, held_out) for number in range(len(images))]
        assert len(set(names)) == 40
    again = lists(samples, seed=1, val_share=0.2)
    assert [images.digest for images in again] == [images.digest for images in parts[1]]
    assert parts[1][0].digest != parts[2][0].digest


def test_the_digest_tells_data_sets_apart() -> None:
    image = pixels()
    base = [(image, 0), (image, 1), (image, 1)]
    digest = lists(base, base)[0].digest
    assert lists([(pixels(), label) for _, label in base], base)[0].digest == digest
    assert lists(base[:2], base)[0].digest != digest
    assert lists([base[1], base[0], base[2]], base)[0].digest != digest
    assert lists(base, base, identity="second version")[0].digest != digest


def test_damaged_samples_are_replaced_and_other_errors_end_the_run() -> None:
    class Fails(LabelledPictures):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            if index == 3:
                raise self.error
            return super().__getitem__(index)

    def batches(error: Exception) -> list[list[int]]:
        samples = [(pixels(), 0) for _ in range(8)]
        images, _ = lists(Fails(samples, targets=[0] * 8, error=error), samples)
        with closing(train_loader(images, Data(batch_size=4))) as loader:
            found = [batch.indices.tolist() for batch in loader.batches(0, 0)]
        assert loader.bad_samples.new_messages() == [
            "sample 3 of the training data set (Fails) cannot be read: torn"
        ]
        return found

    assert 3 not in np.concatenate(batches(OSError("torn")))
    with pytest.raises(
        UserError, match=r"sample 3 of the training.*failed with KeyError: 'x' .*Correct the data"
    ):
        batches(KeyError("x"))


ONE = [(pixels(), 0)]


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        ([], None, "has no samples"),
        (iter([]), None, "is not indexable. Give an object with __len__"),
        (ONE, None, "one must be held out"),
        ([(pixels(), 1.5)], None, "float 1.5, not the"),
        ([(pixels(), -1)], None, "not the number of a class"),
        ([(pixels(), 0), (pixels(), "a")], None, "has numbers and names as labels"),
        (ONE, [(pixels(), 1)], "has labels of no class: 1."),
        (ONE, LabelledPictures(ONE, classes=["z"]), "has classes that training lacks: z."),
        ([(pixels().astype(float), 0)], ONE, "shape (12, 14, 3) and float64"),
        ([(pixels().transpose(2, 0, 1), 0)], ONE, "shape (3, 12, 14) and uint8"),
        (LabelledPictures([{"image": 1}], targets=[0]), ONE, "not a pair (image, lab"),
        (LabelledPictures(ONE, targets=[0, 1]), None, "has 1 samples, but 2 `targets`"),
        (LabelledPictures(ONE, classes=["a", "a"]), None, "name a class twice"),
        (LabelledPictures([(pixels(), 2)], classes=["a", "b"]), ONE, "has labels of no class: 2."),
    ],
)
def test_what_does_not_fit_is_an_error(train: Any, val: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        lists(train, val)


def test_settings_are_checked_against_the_number_of_classes() -> None:
    samples = [(pixels(), 0), (pixels(), 1)]
    config = build_config("", {"loss": "bce", "bce_target_threshold": 0.05})
    with pytest.raises(UserError, match=r"gives each of 2 classes a target of 0\.05"):
        Classification(GivenData(samples, samples).lists).read(config, ALONE)


def test_an_empty_image_is_a_bad_sample() -> None:
    images, _ = lists([(pixels(), 0), (b"", 0), (np.zeros((0, 4, 3), np.uint8), 0)], [(pixels(), 0)])
    for index, message in ((1, "is empty"), (2, "it has no pixels")):
        with pytest.raises(BadSampleError, match=message):
            images.read(index)
