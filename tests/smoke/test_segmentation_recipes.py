"""Every recipe of segmentation: its dry run and the header of its file."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.dry_run import describe
from tests.smoke.test_recipes import configured, header_of, properties_in, recipes_of, toml_of

# Parameters in millions at 150 classes, and steps that the header names.
EXPECTED = {
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
ADE20K, CITYSCAPES = 20_210, 2_975  # training images
NAMES = [name for name in recipes_of("segmentation") if name != "segmentation_demo"]


def test_every_recipe_has_expected_values_here() -> None:
    assert sorted(EXPECTED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_computes_the_properties_of_the_recipe(name: str) -> None:
    config, workload = configured(name)
    reported = properties_in(describe(config, 8, workload))
    parameters = int(reported["model"].split(", ")[1].removesuffix(" parameters").replace(",", ""))
    millions, _ = EXPECTED[name]
    # Cityscapes has 19 classes, which a dry run without its images does not know.
    assert parameters / 1e6 == pytest.approx(millions, abs=0.01)
    assert reported["images"] == "20,210 of 150 classes"
    batch = 8 * toml_of(name)["data"]["batch_size"]
    assert reported["lr"] == f"peak 6e-05 = 6e-05 x {batch} / {batch}"
    state, activations = (float(each) for each in re.findall(r"([\d.]+) GiB", reported["memory"]))
    assert state == pytest.approx(16 * parameters / 2**30, abs=0.06)
    assert 0.5 < activations < 40


@pytest.mark.parametrize("name", NAMES)
def test_the_header_agrees_with_the_recipe(name: str) -> None:
    header, recipe = header_of(name), toml_of(name)
    command = shlex.split(header["Command"])
    request = parse([*command[command.index("horovod_volo.train") + 1 :], "--dry-run"])
    assert request.config.run.name == name
    assert request.config.model.finetune
    assert recipe["published"] == {"needs": ["finetune"]}
    batch, side = recipe["data"]["batch_size"], recipe["model"]["img_size"]
    assert header["Batch"].startswith(f"8 ranks x {batch} = {8 * batch}")
    assert f"(--global-batch {8 * batch})" in header["Batch"]
    epochs = recipe["update"]["epochs"]
    named = re.search(r"at (\d+) px, (\d+) epochs \(([\d,]+) steps of (\d+) images\)", header["What"])
    assert named, header["What"]
    found = [int(number.replace(",", "")) for number in named.groups()]
    assert found == [side, epochs, EXPECTED[name][1], 8 * batch]
    images = CITYSCAPES if "cityscapes" in name else ADE20K
    assert epochs * (images // (8 * batch)) == pytest.approx(EXPECTED[name][1], rel=0.005)


@pytest.mark.parametrize("name", NAMES)
def test_the_stated_hours_follow_from_the_operations(name: str) -> None:
    cost = header_of(name)["Cost"]
    stated = re.match(r"([\d.]+)e18 operations, ([\d.]+) hours of one H200 at 40 % of its peak: an", cost)
    if not stated:
        assert "not known" in cost
        return
    operations, hours = map(float, stated.groups())
    assert hours == pytest.approx(operations * 1e18 / (0.4 * 790e12) / 3600, rel=0.02)


def test_the_demo_is_described() -> None:
    recipe: dict[str, Any] = toml_of("segmentation_demo")
    assert recipe["model"]["model"] == "volo_demo"
    assert header_of("segmentation_demo")["Command"] == "./tools/demo segmentation"
