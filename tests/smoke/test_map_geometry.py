"""A run logs which part of the image label maps cover, and warns if that is assumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.smoke.conftest import run_here

SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "8", "--stop-at-step", "1", "--name", "run")


@pytest.mark.parametrize(
    ("flags", "geometry", "assumed"),
    [
        ((), "corrected geometry, maps of the image's centre crop (centre-crop:576:576)", True),
        (("--map-geometry", "whole"), "corrected geometry, maps of the whole image", False),
        (("--label-geometry", "reference"), "reference geometry, maps of the whole image", False),
    ],
)
def test_a_run_logs_the_geometry_of_published_maps(
    flags: tuple[str, ...],
    geometry: str,
    assumed: bool,
    demo_set: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Published maps record no geometry: that one is assumed is a warning, with what verifies it."""
    maps = shutil.copytree(demo_set / "token_labels", tmp_path / "maps")
    (maps / "map_geometry.txt").unlink()
    paths = ("--token-label-data", str(maps), "--output", str(tmp_path / "runs"))
    result = run_here(str(demo_set), *SMALL, *paths, *flags, streams=capfd)
    assert result.status == 75, result.output  # stopped by --stop-at-step
    assert f"token labels from {maps} ({geometry})" in result.output
    warnings = [line for line in result.lines if line.startswith("   warning  ") and "label map" in line]
    assert len(warnings) == assumed
    assert all(f"tools/labels verify {maps} --data DATA_DIR --teacher NAME" in line for line in warnings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--map-geometry whole", "--token-label-data"),
        ("--token-label-data maps --map-geometry middle", "'middle' is not a geometry of label maps"),
        (
            "--token-label-data maps --map-geometry centre-crop:9:9 --label-geometry reference",
            "Drop it, or --map-geometry centre-crop:9:9.",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    flags: str, message: str, demo_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = ("--output", str(tmp_path / "runs"))
    result = run_here(str(demo_set), *SMALL, *where, *flags.split(), streams=capfd)
    assert result.status == 2
    assert message in result.output
    assert not (tmp_path / "runs").exists()
