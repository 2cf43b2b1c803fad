"""Every recipe of detection: its dry run and the header of its file."""

from __future__ import annotations

import re
import shlex

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.dry_run import describe
from horovod_volo.optim.schedule import SCHEDULES, lr_at
from tests.smoke.test_recipes import configured, header_of, properties_in, recipes_of, toml_of

# Parameters of the networks at 80 classes, and the peak learning rate of 8 ranks.
EXPECTED = {
    "ssd300_resnet34": (19_975_222, "0.0832"),
    "ssd300_resnet50": (22_894_902, "0.0832"),
    "ssd320_volo_d1": (32_726_414, "0.0004"),
}
NAMES = [name for name in recipes_of("detection") if name != "detection_demo"]


def test_every_recipe_has_expected_values_here() -> None:
    assert sorted(EXPECTED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_computes_the_properties_of_the_recipe(name: str) -> None:
    config, workload = configured(name)
    reported = properties_in(describe(config, 8, workload))
    parameters, peak = EXPECTED[name]
    assert reported["model"].split(", ", 1)[1].startswith(f"{parameters:,} parameters")
    assert reported["images"] == "117,266 of 80 classes"
    assert reported["lr"].startswith(f"peak {peak} = {peak} x ")
    assert float(re.findall(r"([\d.]+) GiB", reported["memory"])[1]) > 4


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


def test_the_demo_is_described() -> None:
    assert toml_of("detection_demo")["model"]["model"] == "volo_demo"
    assert header_of("detection_demo")["Command"] == "./tools/demo detection"
