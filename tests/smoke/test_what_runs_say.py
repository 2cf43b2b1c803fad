"""What a run prints of its data: which network it chose, which images it held out, what label maps cover."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from tests.smoke.conftest import run_here

SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "8", "--stop-at-step", "1", "--name", "run")
STOPPED = 75


def test_a_folder_of_classes_is_all_that_training_needs(
    demo_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flowers = shutil.copytree(demo_set / "train", tmp_path / "flowers")
    given = (str(flowers), "--output", str(tmp_path / "runs"))
    result = run_here(*given, "--stop-at-step", "2", streams=capfd)
    assert result.status == STOPPED, result.output
    assert "chosen  volo_demo, images of 64 px" in result.output
    assert "held-out images (10 % of each class)" in result.output
    assert "first step done after" in result.output
    resolved = tmp_path / "runs" / "flowers" / "resolved.toml"
    settings = tomllib.loads(resolved.read_text())
    # What the first run chose holds, although other images would lead to another choice.
    result = run_here(*given, "--resume", "auto", "--stop-at-step", "4", streams=capfd)
    assert result.status == STOPPED, result.output
    assert "resumed  at step 2: epoch 0." in result.output
    again = tomllib.loads(resolved.read_text())
    assert again["update"]["epochs"] == settings["update"]["epochs"]
    assert again["model"] == settings["model"]


def test_a_run_logs_the_geometry_of_published_maps(
    demo_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Published maps record no geometry: that one is assumed is a warning, with what states it."""
    maps = shutil.copytree(demo_set / "token_labels", tmp_path / "maps")
    (maps / "map_geometry.txt").unlink()
    for number, (flags, geometry) in enumerate(
        (
            ((), "corrected geometry, maps of the image's centre crop (centre-crop:576:576)"),
            (("--label-geometry", "reference"), "reference geometry, maps of the whole image"),
        )
    ):
        paths = ("--token-label-data", str(maps), "--output", str(tmp_path / str(number)))
        result = run_here(str(demo_set), *SMALL, *paths, *flags, streams=capfd)
        assert result.status == STOPPED, result.output
        assert f"token labels from {maps} ({geometry})" in result.output
        warnings = [line for line in result.lines if line.startswith("   warning  ") and "label map" in line]
        assert len(warnings) == (not flags)
        assert all("State it with --map-geometry" in line for line in warnings)
