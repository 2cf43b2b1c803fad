"""Recipes for one GPU: what their headers state follows from a dry run, and they train on a small network."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import RECIPES
from horovod_volo.config.validation import config_warnings
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.dry_run import describe, dry_run
from tests.ranks.launching import train
from tests.smoke.test_recipes import OF_ONE_GPU, PARAMETERS, configured, header_of, properties_in, toml_of

FROM_WEIGHTS = [name for name in OF_ONE_GPU if name != "volo_d1_12gb"]
WEIGHTS = "timm:volo_d1_224.sail_in1k"


def gib_of_a_gpu(*flags: str) -> float:
    """Return the memory that a dry run of one rank estimates, with what it reserves."""
    used = properties_in(dry_run(parse([*flags]).config, 1))["memory"]
    return sum(map(float, re.findall(r"([\d.]+) GiB", used))) / 0.9 + 3


@pytest.mark.parametrize("name", OF_ONE_GPU)
def test_the_command_of_a_header_is_for_one_process(name: str) -> None:
    header, recipe = header_of(name), toml_of(name)
    command = shlex.split(header["Command"])
    assert command[:3] == ["python", "-m", "horovod_volo.train"]
    config = parse(command[3:]).config
    assert config.run.name == name
    assert config.update.lr_base_size == recipe["data"].get("global_batch", config.data.batch_size)
    assert config_warnings(config) == []
    assert header["Batch"].startswith(f"1 rank x {config.data.batch_size}")
    assert "horovodrun" not in (RECIPES / f"{name}.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FROM_WEIGHTS)
def test_a_recipe_begins_with_the_weights_of_the_authors(name: str) -> None:
    recipe, header = toml_of(name), header_of(name)
    assert recipe["model"]["finetune"] == WEIGHTS
    assert "no GPU has run" in header["Published"]
    assert header["Cost"] == "not measured on any GPU"
    text = dry_run(parse(["--recipe", name, "--num-classes", "102"]).config, 1)
    assert "warning  " in text  # on the number of images, which is assumed
    assert "has no effect" not in text


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("finetune_folder", ["--batch-size", "16"]),
        ("transfer_small", ["--batch-size", "32"]),
        ("volo_d1_12gb", ["--grad-checkpoint"]),
    ],
)
def test_the_memory_of_a_header_is_that_of_a_dry_run(name: str, flags: list[str]) -> None:
    classes = [] if "12gb" in name else ["--num-classes", "102"]
    stated = [float(number) for number in re.findall(r"about ([\d.]+)\s+GiB", header_of(name)["Memory"])]
    found = [gib_of_a_gpu("--recipe", name, *classes, *more) for more in ([], flags)]
    assert stated == pytest.approx(found, abs=0.1)
    assert max(found) < 11.7


def test_on_twelve_gigabytes_the_published_batch_is_accumulated() -> None:
    name, (config, workload) = "volo_d1_12gb", configured("volo_d1_12gb")
    reported = properties_in(describe(config, 1, workload))
    assert reported["batch"] == "1,024 images per step = 1 ranks x 64 images x 16 micro-batches"
    assert reported["lr"] == "peak 0.0016 = 0.0016 x 1024 / 1024"
    assert reported["memory"].endswith("a GPU of 12 GB")
    assert workload.scalars() == PARAMETERS["volo_d1"]
    recipe, published = toml_of(name), toml_of("volo_d1")
    own = {"batch_size": 64, "global_batch": 1024}
    assert recipe["data"] == published["data"] | own
    assert {**recipe, "data": {}} == {
        key: {} if key == "data" else table for key, table in published.items() if key != "exchange"
    }


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images of ten classes, and images of two of them for a folder of one's own."""
    folder = tmp_path_factory.mktemp("sets")
    make_demo_set(folder / "ten", train=80, val=20)
    for split in ("train", "val"):
        for name in ("ring", "star"):
            shutil.copytree(folder / "ten" / split / name, folder / "own" / split / name)
    return folder


@pytest.fixture(scope="module")
def weights(sets: Path) -> Path:
    small = ("--recipe", "demo", "--img-size", "32", "--epochs", "1", "--warmup-epochs", "0")
    where = ("--output", str(sets), "--name", "weights")
    done = train(str(sets / "ten"), *small, *where, ranks=1, start_with="none")
    assert done.returncode == 0, done.stdout
    return sets / "weights"


@pytest.mark.parametrize("name", FROM_WEIGHTS)
def test_a_recipe_trains_a_small_network_from_the_weights_of_a_run(
    name: str, sets: Path, weights: Path, tmp_path: Path
) -> None:
    small = ("--model", "volo_demo", "--img-size", "32", "--batch-size", "8", "--epochs", "2")
    more = ("--warmup-epochs", "0", "--precision", "fp32", "--finetune", str(weights))
    where = ("--output", str(tmp_path), "--name", "run")
    done = train(str(sets / "own"), "--recipe", name, *small, *more, *where, ranks=1, start_with="none")
    assert done.returncode == 0, done.stdout
    assert "2 classes" in done.stdout
    assert ("194 of 530,708 parameters; frozen: backbone" in done.stdout) == (name == "linear_probe")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum("top1" in json.loads(line) for line in lines) == 2
    resolved = tomllib.loads((tmp_path / "run" / "resolved.toml").read_text())
    assert resolved["objective"]["mix_token"] is False
