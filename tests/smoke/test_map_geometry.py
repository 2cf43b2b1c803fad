"""A run logs which part of the image label maps cover, and warns if that is assumed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.smoke.conftest import run_here

SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "8", "--stop-at-step", "1", "--name", "run")
WHOLE, CENTRE = "maps of the whole image", "maps of the image's centre crop (centre-crop:576:576)"


@pytest.fixture
def published(demo_set: Path, tmp_path: Path) -> Path:
    """Return label maps in the published form, without a record of their geometry."""
    shutil.copytree(demo_set / "token_labels", tmp_path / "maps")
    (tmp_path / "maps" / "map_geometry.txt").unlink()
    return tmp_path / "maps"


@pytest.mark.parametrize(
    ("flags", "geometry", "assumed"),
    [
        ((), f"corrected geometry, {CENTRE}", True),
        (("--map-geometry", "whole"), f"corrected geometry, {WHOLE}", False),
        (("--label-geometry", "reference"), f"reference geometry, {WHOLE}", False),
    ],
)
def test_a_run_logs_the_geometry_of_published_maps(
    flags: tuple[str, ...],
    geometry: str,
    assumed: bool,
    published: Path,
    demo_set: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    paths = ("--token-label-data", str(published), "--output", str(tmp_path / "runs"))
    result = run_here(str(demo_set), *SMALL, *paths, *flags, streams=capfd)
    assert result.status == 75, result.output  # stopped by --stop-at-step
    assert f"token labels from {published} ({geometry})" in result.output
    warnings = [line for line in result.lines if line.startswith("   warning  ") and "label map" in line]
    assert len(warnings) == assumed
    if assumed:
        assert f"a label map in {published} is assumed to cover the image's centre crop" in warnings[0]
        assert f"tools/labels verify {published} --data DATA_DIR --teacher NAME" in warnings[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--map-geometry", "whole"), "--map-geometry needs --token-label-data. Add"),
        (
            ("--token-label-data", "maps", "--map-geometry", "middle"),
            "'middle' is not a geometry of label maps",
        ),
        (
            (
                "--token-label-data",
                "maps",
                "--map-geometry",
                "centre-crop:9:9",
                "--label-geometry",
                "reference",
            ),
            "Drop it, or --map-geometry centre-crop:9:9.",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    flags: tuple[str, ...], message: str, demo_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run_here(str(demo_set), *SMALL, "--output", str(tmp_path / "runs"), *flags, streams=capfd)
    assert result.status == 2
    assert message in result.output
    assert not (tmp_path / "runs").exists()
