"""The comparison with a teacher finds which part of its image a label map covers.

The maps are made from whole images and, as by the published generator, from crops of timm's evaluation
transform. The teacher's weights are random, which suffices for labels that depend on the position.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from coded_images import smooth, write_images
from PIL import Image

from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.labelling.teacher import Teacher, TeacherChoice, load_teacher
from horovod_volo.labelling.verify import compare_geometries, spatial_correlation
from horovod_volo.labels import main
from horovod_volo.models.build import build_model
from horovod_volo.token_labels.geometry import PUBLISHED, WHOLE, MapGeometry
from horovod_volo.token_labels.keys import label_key

# isort: split
from timm.data import create_transform  # torchvision imports only after horovod_volo.models

SIDE, CLASSES = 96, 10
SIZES = [(160, 100), (97, 151), (120, 90), (64, 64)]  # width, height
IMAGES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images of ten classes, a teacher's weights and slightly perturbed ones."""
    folder = tmp_path_factory.mktemp("geometry")
    images = {
        f"train/{n % CLASSES}/{n:02d}.png": smooth(*SIZES[n % len(SIZES)], seed=n) for n in range(IMAGES)
    }
    write_images(folder / "images", images)
    torch.manual_seed(0)
    network = build_model("volo_demo", img_size=SIDE, num_classes=CLASSES, drop_path=0.0)
    torch.save(network.state_dict(), folder / "teacher.pt")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * parameter.std(correction=0) * torch.randn_like(parameter))
    torch.save(network.state_dict(), folder / "perturbed.pt")
    teacher = load_teacher(TeacherChoice("volo_demo", str(folder / "teacher.pt"), image_side=SIDE), CLASSES)
    catalog = build_catalog(str(folder / "images"), "train", None)
    for geometry in (WHOLE, PUBLISHED, MapGeometry(128, 96)):
        save_maps(folder / str(geometry), catalog, teacher, geometry)
    return folder


def save_maps(folder: Path, catalog: Catalog, teacher: Teacher, geometry: MapGeometry) -> None:
    """Save the teacher's maps in the published format."""
    crop_pct = geometry.size / geometry.resize if geometry.resize else 1.0
    transform = create_transform(
        SIDE, crop_pct=crop_pct, interpolation="bicubic", mean=(0, 0, 0), std=(1, 1, 1)
    )
    for index in range(len(catalog)):
        with Image.open(catalog.location(index)) as opened:
            image = opened.convert("RGB")
        shown = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC) if geometry == WHOLE else image
        best = teacher.label(transform(shown)[None])[0].topk(5, dim=0)
        file = folder / f"{label_key(catalog.name(index))}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.stack([best.values, best.indices.float()]).half(), file)


CENTRE, SMALLER = "centre-crop:576:576", "centre-crop:128:96"


@pytest.mark.parametrize(
    ("weights", "truth", "stated", "better", "compared"),
    [
        ("teacher.pt", "whole", CENTRE, "whole", 18),  # square images are left out
        ("perturbed.pt", CENTRE, CENTRE, CENTRE, 18),
        ("perturbed.pt", SMALLER, SMALLER, SMALLER, IMAGES),
        ("perturbed.pt", "whole", SMALLER, "whole", IMAGES),
    ],
)
def test_the_right_geometry_fits_better(
    folder: Path, weights: str, truth: str, stated: str, better: str, compared: int
) -> None:
    choice = TeacherChoice("volo_demo", str(folder / weights), image_side=SIDE, batch_size=8)
    catalog = build_catalog(str(folder / "images"), "train", None)
    progress: list[tuple[int, int]] = []
    geometry = MapGeometry.parse(stated)
    result = compare_geometries(
        folder / truth, geometry, catalog, choice, IMAGES, lambda *done: progress.append(done)
    )
    assert str(result.better) == better
    assert (str(result.recorded), len(result.correlations)) == (stated, compared)
    assert progress[-1] == (2 * IMAGES, 2 * IMAGES)
    assert max(result.means) > (0.99 if weights == "teacher.pt" else 0.85)
    assert abs(result.means[0] - result.means[1]) > 0.05


def verify(folder: Path, *arguments: str, images: str = "images") -> list[str]:
    data = ["--data", str(folder / images), "--images", str(IMAGES)]
    teacher = ["--teacher", "volo_demo", "--img-size", str(SIDE), "--teacher-weights"]
    return ["verify", *arguments, *data, *teacher, str(folder / "teacher.pt")]


def test_the_command_fails_if_the_other_geometry_fits_better(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = str(folder / CENTRE)
    wrong, right = str(tmp_path / "wrong"), str(tmp_path / "right")
    assert main(["import", published, wrong, "--map-geometry", "whole", "--workers", "1"]) == 0
    assert main(["import", published, right, "--workers", "1"]) == 0
    assert f"Verify it with tools/labels verify {right} --data" in capsys.readouterr().err
    assert main(verify(folder, wrong)) == 1
    output = capsys.readouterr()
    assert "fits better            centre-crop:576:576\n" in output.out
    assert "error: " in output.err
    assert "--map-geometry centre-crop:576:576" in output.err
    for arguments in ([right], [wrong, "--map-geometry", CENTRE], [published]):
        assert main(verify(folder, *arguments)) == 0
        assert "fits better            centre-crop:576:576\n" in capsys.readouterr().out


def test_a_teacher_needs_images(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder / CENTRE), "--teacher", "volo_demo"]) == 2
    assert "--data DATA_DIR" in capsys.readouterr().err


def test_without_informative_images_the_result_is_undecided(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    squares = {f"train/{n}/{n:02d}.png": smooth(64, 64, seed=n) for n in range(CLASSES)}
    write_images(folder / "squares", squares)
    assert main(verify(folder, str(folder / "whole"), images="squares")) == 0
    assert "undecided: increase --images\n" in capsys.readouterr().out


def test_the_correlation_is_between_equal_positions() -> None:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 4, 4, generator=random)
    best = logits.topk(3, dim=0)
    assert spatial_correlation(best.values, best.indices, logits) == pytest.approx(1, abs=1e-6)
    mirrored = spatial_correlation(best.values, best.indices, logits.flip(2))
    assert mirrored is not None
    assert mirrored < 0.5
    assert spatial_correlation(best.values, best.indices, torch.zeros(6, 4, 4)) is None
