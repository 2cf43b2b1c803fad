"""Every recipe of segmentation and detection: its dry run and the header of its file."""

from __future__ import annotations

import re
import shlex

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.dry_run import describe
from horovod_volo.optim.schedule import SCHEDULES, lr_at
from tests.smoke.test_recipes import configured, header_of, properties_in, recipes_of, toml_of

# Parameters in millions at 150 classes, and steps that the header names. Cityscapes has 19 classes, which a
# dry run without its images does not know.
SEGMENTATION = {
    "lvvit_l_upernet": (208.74, 160_000),
    "lvvit_m_upernet": (77.27, 160_000),
    "lvvit_s_upernet": (44.45, 160_000),
    "upernet_volo_d1": (66.17, 160_000),
    "upernet_volo_d1_cityscapes": (67.35, 80_000),
    "upernet_volo_d2": (97.33, 160_000),
    "upernet_volo_d3": (124.97, 160_000),
    "upernet_volo_d4": (228.57, 160_000),
    "upernet_volo_d5": (328.70, 160_000),
}
# Parameters in millions at 80 classes, and the peak learning rate of 8 ranks.
DETECTION = {
    "ssd300_resnet34": (19.975222, "0.0832"),
    "ssd300_resnet50": (22.894902, "0.0832"),
    "ssd320_volo_d1": (32.726414, "0.0004"),
}
NAMES = [*SEGMENTATION, *DETECTION]
ADE20K, CITYSCAPES = 20_210, 2_975  # training images


def test_every_recipe_has_expected_values_here() -> None:
    recipes = {*recipes_of("segmentation"), *recipes_of("detection")}
    assert recipes == {*NAMES, "segmentation_demo", "detection_demo"}


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_computes_the_properties_of_the_recipe(name: str) -> None:
    config, workload = configured(name)
    reported = properties_in(describe(config, 8, workload))
    parameters = int(reported["model"].split(", ")[1].removesuffix(" parameters").replace(",", ""))
    batch = 8 * toml_of(name)["data"]["batch_size"]
    state, activations = (float(each) for each in re.findall(r"([\d.]+) GiB", reported["memory"])[:2])
    if name in DETECTION:
        millions, peak = DETECTION[name]
        assert reported["images"] == "117,266 of 80 classes"
        assert reported["lr"].startswith(f"peak {peak} = {peak} x ")
        assert activations > 4
    else:
        millions, _ = SEGMENTATION[name]
        assert reported["images"] == "20,210 of 150 classes"
        assert reported["lr"] == f"peak 6e-05 = 6e-05 x {batch} / {batch}"
        assert state == pytest.approx(16 * parameters / 2**30, abs=0.06)
        assert 0.5 < activations < 40
    assert parameters / 1e6 == pytest.approx(millions, abs=0.01 if name in SEGMENTATION else 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_header_agrees_with_the_recipe(name: str) -> None:
    header, recipe = header_of(name), toml_of(name)
    command = shlex.split(header["Command"])
    request = parse([*command[command.index("horovod_volo.train") + 1 :], "--dry-run"])
    assert request.config.run.name == name
    assert request.config.model.finetune
    batch, side, epochs = (
        recipe["data"]["batch_size"],
        recipe["model"]["img_size"],
        recipe["update"]["epochs"],
    )
    assert header["Batch"].startswith(f"8 ranks x {batch} = {8 * batch}")
    assert re.search(rf"at {side} px, {epochs} epochs", header["What"])
    if name in SEGMENTATION:
        steps = SEGMENTATION[name][1]
        assert recipe["published"] == {"needs": ["finetune"]}
        assert f"(--global-batch {8 * batch})" in header["Batch"]
        assert f"({steps:,} steps of {8 * batch} images)" in header["What"]
        images = CITYSCAPES if "cityscapes" in name else ADE20K
        assert epochs * (images // (8 * batch)) == pytest.approx(steps, rel=0.005)


@pytest.mark.parametrize("name", SEGMENTATION)
def test_the_stated_hours_follow_from_the_operations(name: str) -> None:
    cost = header_of(name)["Cost"]
    stated = re.match(r"([\d.]+)e18 operations, ([\d.]+) hours of one H200 at 40 % of its peak: an", cost)
    if not stated:
        assert "not known" in cost
        return
    operations, hours = map(float, stated.groups())
    assert hours == pytest.approx(operations * 1e18 / (0.4 * 790e12) / 3600, rel=0.02)


def test_the_learning_rate_is_divided_before_epochs_43_and_54() -> None:
    decay = SCHEDULES.find(toml_of("ssd300_resnet50")["update"]["sched"])
    per_epoch = 114
    rates = [
        lr_at(
            epoch * per_epoch,
            decay=decay,
            peak=1.0,
            start=0.0,
            floor=0.0,
            warmup=per_epoch,
            decay_steps=65 * per_epoch,
        )
        for epoch in range(65)
    ]
    assert rates[:2] == [0.0, 1.0]
    assert rates[42:44] == [1.0, 0.1]
    assert rates[53:] == pytest.approx([0.1, *[0.01] * 11])
