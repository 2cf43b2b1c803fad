"""Generated maps belong to their images by full name, and give training the teacher's distribution."""

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from coded_images import smooth, write_images
from PIL import Image

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.command_line import build_config
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import Normalization
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.images.split_folder import HeldOut
from horovod_volo.data.packing.pack import PackOptions, pack
from horovod_volo.engine.classification import Classification
from horovod_volo.labelling.generate import (
    TeacherChoice,
    centred,
    generate_labels,
    load_teacher,
    teacher_images,
    token_logits,
)
from horovod_volo.labelling.store_writer import LabelStoreWriter
from horovod_volo.models.build import build_model
from horovod_volo.models.pretrained import PretrainedModel
from horovod_volo.objective.label_map import map_targets
from horovod_volo.token_labels.source import classes_warnings, map_warnings
from horovod_volo.token_labels.store import LabelStore

SIDE, CLASSES, TOP = 64, 10, 3
# Pairs of names are equal up to the first dot.
NAMES = [f"{name}/{file}" for name in "abcdefghij" for file in ("scan.0001.png", "scan.0002.png", "x.png")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    for split in ("train", "val"):
        images = {f"{split}/{name}": smooth(60, 50, seed=number) for number, name in enumerate(NAMES)}
        write_images(folder / "images", images)
    torch.manual_seed(0)
    network = build_model("volo_demo", img_size=SIDE, num_classes=CLASSES, drop_path=0.0)
    with torch.no_grad():
        network.aux_head.weight.mul_(12)  # so that it is sure of its answers, which differ between images
    # Logits of a network that learned binary cross-entropies are below 0, but for the right class.
    for name, bias in (("centred", 0.01), ("bias of -9", -9.0), ("binary", -4.0)):
        with torch.no_grad():
            network.aux_head.bias.fill_(bias)
        torch.save(network.state_dict(), folder / f"{name}.pt")
    return folder


def catalog_of(folder: Path, held_out: HeldOut | None = None) -> Catalog:
    return build_catalog(str(folder), "train", None, held_out)


def choice_of(folder: Path, weights: str) -> TeacherChoice:
    return TeacherChoice("volo_demo", str(folder / f"{weights}.pt"), image_side=SIDE, batch_size=8)


def logits_by_name(folder: Path, weights: str) -> dict[str, torch.Tensor]:
    """Return the teacher's logits (classes, rows, columns) of each image, by its full name."""
    catalog = catalog_of(folder / "images")
    teacher = load_teacher(choice_of(folder, weights), catalog.classes)
    with closing(teacher_images(teacher, catalog, 8, RankResources(torch.device("cpu"), 1, ""))) as images:
        return {
            catalog.name(int(index)): logits
            for pending, pixels in images.decoded()
            for index, logits in zip(pending.indices, token_logits(teacher.network, pixels), strict=True)
        }


def generate(folder: Path, store: Path, weights: str, *, top: int = TOP) -> Path:
    images, teacher = str(folder / "images"), choice_of(folder, weights)
    made = generate_labels(images, store, teacher, top, World.single(), lambda *_: None)
    assert made == (len(NAMES), [])
    return store


def distance(scores: np.ndarray, ids: np.ndarray, logits: torch.Tensor) -> float:
    """Return the largest total variation distance of a cell's target in training from the teacher's softmax.

    The target cannot tell apart the classes that are not stored: their probabilities are summed.
    """
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    maps = (torch.from_numpy(part)[None] for part in (scores, ids))
    sides = (scores.shape[1],)
    (target,) = map_targets(*maps, whole, sides=sides, num_classes=CLASSES, geometry="corrected")
    dense = target.uniform[:, None].repeat(1, CLASSES).scatter_add_(1, target.ids, target.weights)
    classes = torch.from_numpy(ids).long().flatten(1).T  # (cells, k)
    found, expected = (
        torch.cat([stored := rows.gather(1, classes), 1 - stored.sum(dim=1, keepdim=True)], dim=1)
        for rows in (dense, logits.softmax(dim=0).flatten(1).T)
    )
    return float((found - expected).abs().sum(dim=1).max() / 2)


@pytest.mark.parametrize("weights", ["centred", "bias of -9", "binary"])
@pytest.mark.parametrize("top", [1, TOP, CLASSES - 1, CLASSES])
def test_targets_of_training_are_the_teachers_softmax(folder, tmp_path, weights, top):
    store = generate(folder, tmp_path / "s", weights, top=top)
    labels, logits = LabelStore(store, catalog_of(folder / "images"), None), logits_by_name(folder, weights)
    assert map_warnings(str(store), labels) == []
    found = [distance(*labels.read(index), logits[name]) for index, name in enumerate(sorted(NAMES))]
    assert max(found) < 0.004  # what rounding to fp16 does


def test_each_image_has_its_own_map_in_other_catalogs(folder: Path, tmp_path: Path) -> None:
    store = generate(folder, tmp_path / "s", "centred")
    pack(folder / "images", tmp_path / "packed", PackOptions(), workers=1, progress=lambda _: lambda *_: None)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "train").symlink_to(folder / "images" / "train")
    for catalog in (catalog_of(tmp_path / "packed"), catalog_of(tmp_path / "shared", HeldOut("", 0.34, 0))):
        labels, logits = LabelStore(store, catalog, None), logits_by_name(folder, "centred")
        for index in range(len(catalog)):
            assert distance(*labels.read(index), logits[catalog.name(index)]) < 0.004, catalog.name(index)


def test_maps_for_another_order_of_the_classes_are_told(folder: Path, tmp_path: Path) -> None:
    catalog = catalog_of(folder / "images")
    labels = LabelStore(generate(folder, tmp_path / "s", "centred"), catalog, None)
    named = [np.bincount(labels.read(index)[1][0].ravel()).argmax() for index in range(len(catalog))]
    catalog.targets = np.array(named, np.int32)
    assert classes_warnings("s", labels, catalog) == []
    catalog.targets = (catalog.targets + 1) % CLASSES
    (warning,) = classes_warnings("s", labels, catalog)
    assert warning.startswith("only 0 of the 30 label maps of s that were tried")


def test_images_that_were_repaired_are_labelled_when_the_command_is_resumed(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    image = tmp_path / "images/train" / NAMES[4]
    image.write_bytes(b"no image")
    monkeypatch.setattr(LabelStoreWriter, "finish", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(tmp_path, tmp_path / "s", "centred")
    monkeypatch.undo()
    shutil.copy(folder / "images/train" / NAMES[4], image)
    generate(tmp_path, tmp_path / "s", "centred")  # leaves no image out


def test_a_file_of_weights_precedes_those_of_timm() -> None:
    with pytest.raises(UserError, match="There are no weights at nowhere"):
        load_teacher(TeacherChoice("resnet10t", "nowhere", pretrained=True), ["a"])


def test_extreme_logits_stay_finite_and_keep_their_probabilities() -> None:
    random = torch.Generator().manual_seed(0)
    ordinary = torch.randn(1, 1000, 2, 2, generator=random)
    masked = torch.full((1, 1000, 2, 2), -torch.inf)
    masked[:, 5:8] = torch.tensor([1.0, 0.5, -3.0]).view(3, 1, 1)
    shifted = (ordinary + 1e4, ordinary - 6e4)
    for logits in (50 * ordinary, 1e6 * ordinary, *shifted, masked, masked.clamp(min=-1e9)):
        best = centred(logits, 3).topk(3, dim=1)
        scores = best.values.clamp(min=0).half()
        assert scores.isfinite().all()
        stored = torch.zeros_like(logits).scatter_(1, best.indices, scores.float()).softmax(dim=1)
        difference = stored.gather(1, best.indices) - logits.softmax(dim=1).gather(1, best.indices)
        assert difference.abs().max() < 0.004


def test_logits_that_are_not_finite_are_refused(folder: Path, tmp_path: Path) -> None:
    weights = torch.load(folder / "centred.pt", weights_only=True)
    weights["aux_head.bias"][3] = torch.nan
    torch.save(weights, folder / "not finite.pt")
    with pytest.raises(UserError, match=r"are not finite\. Check that the weights are complete"):
        generate(folder, tmp_path / "s", "not finite")


def test_an_image_that_is_held_out_does_not_share_a_published_map(tmp_path: Path) -> None:
    """The map may be that of the image that is held out."""
    names = [f"{name}/{file}" for name in "ab" for file in ("scan.1.png", "scan.2.png")]
    write_images(tmp_path / "images", {f"train/{name}": smooth(9, 9, seed=1) for name in names})
    for name in "ab":
        (tmp_path / "maps" / name).mkdir(parents=True)
        torch.save(torch.zeros(2, 1, 4, 4), tmp_path / "maps" / name / "scan.pt")
    settings = {"data_dir": str(tmp_path / "images"), "val_share": 0.5, "num_classes": 0}
    labels = {"token_label": True, "token_label_data": str(tmp_path / "maps")}
    with pytest.raises(UserError, match=r"/scan\.\d\.png and ./scan\.\d\.png in .* have the same label map"):
        Classification().read(build_config("", settings | labels), World.single())


SQUARE = 48
NORMALIZATION = Normalization((0.3, 0.4, 0.5), (0.1, 0.2, 0.3))
SIZES = [(90, 40), (33, 70), (64, 64), (120, 61), (50, 50), (47, 31), (200, 100), (31, 90), (55, 44)]


@pytest.fixture
def uneven(tmp_path):
    images = {f"train/a/{n}.png": smooth(*size, seed=n) for n, size in enumerate(SIZES)}
    return write_images(tmp_path, images)


def opened(folder, batch=2):
    catalog = build_catalog(str(folder), "train", None)
    teacher = PretrainedModel(torch.nn.Identity(), "", SQUARE, 1, 1.0, *NORMALIZATION, "bilinear", [])
    return closing(teacher_images(teacher, catalog, batch, RankResources(torch.device("cpu"), 2, "")))


def pixels_by_index(images, indices):
    found = {}
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in NORMALIZATION)
    for pending, batch in images.decoded(np.array(indices)):
        usable, pixels = ~pending.bad, 255 * (batch * std + mean).numpy()
        found |= dict(zip(pending.indices[usable].tolist(), pixels[usable], strict=True))
    return found


def test_pixels_equal_pils(uneven):
    with opened(uneven) as images:
        for indices in (range(4), range(4, 9)):  # decoded() can be called again
            found = pixels_by_index(images, indices)
            assert list(found) == list(indices)
            for index, pixels in found.items():
                with Image.open(uneven / f"train/a/{index}.png") as image:
                    resized = image.convert("RGB").resize((SQUARE, SQUARE), Image.Resampling.BILINEAR)
                assert np.abs(pixels - np.asarray(resized).transpose(2, 0, 1)).mean() < 0.35
        assert images.bad_samples.new_messages() == []


@pytest.mark.parametrize("batch", [1, 2, 4, 20])
def test_damaged_images_are_marked_and_reported(uneven, batch):
    with opened(uneven, batch) as images:
        whole = pixels_by_index(images, range(9))
    damaged = {0: b"", 3: b"no image at all", 4: (uneven / "train/a/4.png").read_bytes()[:60], 8: None}
    for index, content in damaged.items():
        path = uneven / f"train/a/{index}.png"
        if content is not None:
            path.write_bytes(content)
    with opened(uneven, batch) as images:
        (uneven / "train/a/8.png").unlink()
        found = pixels_by_index(images, range(9))
        problems = images.bad_samples.new_messages()
    assert list(found) == [1, 2, 5, 6, 7]
    for index, pixels in found.items():
        assert np.array_equal(pixels, whole[index])
    assert sorted(problem.split(".png")[0][-1] for problem in problems) == ["0", "3", "4", "8"]
