"""Every recipe of classification: its dry run and the header of its file.

Expected values are computed here from the TOML file and the parameter counts below.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from functools import cache
from typing import Any

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import RECIPES, recipe_names
from horovod_volo.config.schema import Config
from horovod_volo.dry_run import Workload, describe, measure_workload

RANKS = (1, 8, 40, 256)
IN_1K, IN_22K = (1_281_167, 1_000), (14_197_122, 21_841)
GIB = 2**30
# Parameters, and the published peak learning rate and global batch, or those in the header if nothing was
# published; the demo has neither.
PUBLISHED: dict[str, tuple[int, float, int]] = {
    "demo": (725_666, 0.0, 0),
    # Two heads, with biases.
    "imagenet22k_volo_d1": (26_632_040 + 2 * (384 + 1) * (21_841 - 1_000), 1.6e-3, 1024),
    "lvvit_l": (150_021_968, 1e-3, 1024),
    "lvvit_m": (55_830_544, 1.6e-3, 1024),
    "lvvit_s": (26_151_824, 1.6e-3, 1024),
    "lvvit_s_384": (26_297_744, 5e-6, 512),
    "lvvit_t": (8_534_720, 1.6e-3, 1024),
    "resnet101_22k": (44_549_160 + (2_048 + 1) * (21_841 - 1_000), 6.25, 5120),
    "resnet50_1k": (25_557_032, 10.0, 8192),
    "vit_base": (86_615_272, 5e-4 * 1024 / 512, 1024),
    "volo_d1": (26_632_040, 1.6e-3, 1024),
    "volo_d1_384": (26_777_960, 8e-6, 512),
    "volo_d2": (58_678_336, 1e-3, 1024),
    "volo_d2_384": (58_872_896, 8e-6, 384),
    "volo_d3": (86_325_072, 1e-3, 1024),
    "volo_d3_448": (86_626_128, 8e-6, 240),
    "volo_d4": (192_961_520, 1e-3, 1024),
    "volo_d4_448": (193_413_104, 5e-6, 512),
    "volo_d5": (295_455_584, 8e-4, 1024),
    "volo_d5_448": (295_907_168, 5e-6, 512),
    "volo_d5_512": (296_091_488, 5e-6, 512),
}
PARAMETERS = {name: each[0] for name, each in PUBLISHED.items()}
PEAKS = {name: each[1:] for name, each in PUBLISHED.items() if name != "demo"}


def recipes_of(task: str) -> list[str]:
    """Return the names of a task's recipes."""
    tables = {name: tomllib.loads((RECIPES / f"{name}.toml").read_text()) for name in recipe_names()}
    return [name for name, table in tables.items() if table["model"].get("task", "classification") == task]


# One process, other weights than random ones, or a global batch: test_recipes_for_one_gpu.py.
OF_ONE_GPU = ["finetune_folder", "linear_probe", "transfer_small", "volo_d1_12gb"]
OF_CLASSIFICATION = [name for name in recipes_of("classification") if name not in OF_ONE_GPU]
OF_A_CLUSTER = [name for name in OF_CLASSIFICATION if name != "demo"]


@cache
def configured(name: str) -> tuple[Config, Workload]:
    """Read a recipe and measure its workload, which does not depend on the number of ranks."""
    config = parse(["--recipe", name]).config
    return config, measure_workload(config)


def properties_in(text: str) -> dict[str, str]:
    """Return the properties that a dry run prints after the settings."""
    lines = text[text.index("     ranks  ") :].splitlines()
    return {line[:10].strip(): line[12:] for line in lines}


def toml_of(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))


def header_of(name: str) -> dict[str, str]:
    """Return the entries of a recipe's header by name, with continuation lines joined."""
    found: dict[str, str] = {}
    last = ""
    for line in (RECIPES / f"{name}.toml").read_text(encoding="utf-8").split("\n\n")[0].splitlines():
        named = re.match(r"# (\w[\w -]*): +(.*)", line)
        if named:
            last = named[1]
            found[last] = named[2]
        else:
            found[last] = f"{found[last].removesuffix(chr(92)).rstrip()} {line.lstrip('# ')}"
    return found


def test_every_recipe_has_expected_values_here() -> None:
    assert sorted(PARAMETERS) == OF_CLASSIFICATION
    assert sorted(PEAKS) == OF_A_CLUSTER


@pytest.mark.parametrize("name", OF_CLASSIFICATION)
def test_a_dry_run_computes_the_properties_of_the_recipe(name: str) -> None:
    recipe = toml_of(name)
    update = recipe["update"]
    images, classes = IN_22K if "22k" in name else IN_1K
    averages = {"adamw": 2, "lars": 1}[update.get("opt", "adamw")]
    floats = 2 + averages + ("ema_decay" in update)  # weights, gradients, optimizer, averaged weights
    config, workload = configured(name)
    for ranks in RANKS:
        reported = properties_in(describe(config, ranks, workload))
        batch = ranks * recipe["data"]["batch_size"]
        steps = images // batch * (update["epochs"] + update["cooldown_epochs"])
        assert reported["ranks"] == str(ranks)
        assert reported["model"].split(", ")[1] == f"{PARAMETERS[name]:,} parameters"
        assert reported["images"] == f"{images:,} of {classes:,} classes"
        assert reported["batch"].startswith(f"{batch:,} images per step = {ranks} ranks x ")
        assert (
            reported["lr"].split(" = ")[0] == f"peak {update['lr_base'] * batch / update['lr_base_size']:.3g}"
        )
        assert f" = {steps:,} steps (" in reported["length"]
        state, activations = re.findall(r"([\d.]+) GiB", reported["memory"])
        assert state == f"{4 * floats * PARAMETERS[name] / GIB:.1f}"
        assert name == "demo" or 1 < float(activations) < 60


@pytest.mark.parametrize("name", OF_A_CLUSTER)
def test_the_published_batch_has_the_published_peak_learning_rate(name: str) -> None:
    peak, batch = PEAKS[name]
    ranks = batch // toml_of(name)["data"]["batch_size"]
    reported = properties_in(describe(configured(name)[0], ranks, configured(name)[1]))
    assert reported["batch"].startswith(f"{batch:,} images per step")
    # Nothing is scaled, so --warmup-lr and --min-lr are not shown.
    assert reported["lr"] == f"peak {peak:.3g} = {peak:.3g} x {batch} / {batch}"


@pytest.mark.parametrize("name", recipe_names())
def test_a_header_has_the_required_entries(name: str) -> None:
    assert {"What", "Published", "Source", "Command", "Cost"} <= header_of(name).keys()


@pytest.mark.parametrize("name", OF_A_CLUSTER)
def test_the_command_of_a_header_has_the_batch_of_the_header(name: str) -> None:
    header = header_of(name)
    command = shlex.split(header["Command"])
    ranks = int(command[command.index("-np") + 1])
    assert command[: command.index("horovod_volo.train") + 1] == shlex.split(
        f"horovodrun -np {ranks} python -m horovod_volo.train"
    )
    request = parse([*command[command.index("horovod_volo.train") + 1 :], "--dry-run"])
    assert request.config.run.name == name
    assert (RECIPES / f"{name}.toml").is_file()
    recipe = toml_of(name)
    assert request.config.model.img_size == recipe["model"]["img_size"]
    assert bool(request.config.model.finetune) == (recipe["update"]["weight_decay"] == 1e-8)
    batch = recipe["data"]["batch_size"]
    assert header["Batch"].startswith(f"{ranks} ranks x {batch} = {ranks * batch}")
    assert ranks * batch == PEAKS[name][1] == recipe["update"]["lr_base_size"]
    assert f"(--global-batch {ranks * batch}); any other scales all learning rates" in header["Batch"]


@pytest.mark.parametrize("name", OF_A_CLUSTER)
def test_a_recipe_requires_the_inputs_of_its_published_command(name: str) -> None:
    header, published = header_of(name), toml_of(name).get("published", {})
    assert bool(published) == name.startswith(("volo_", "lvvit_"))
    accuracy = re.match(r"([\d.]+) % top-1", header["Published"])
    assert published.get("top1") == (float(accuracy[1]) if accuracy else None)
    inputs = ("--token-label-data", "--finetune", "--ground-truth")
    given = {flag[2:].replace("-", "_") for flag in inputs if flag in shlex.split(header["Command"])}
    assert set(published.get("needs", [])) == given


@pytest.mark.parametrize("name", OF_A_CLUSTER)
def test_the_stated_hours_follow_from_the_images_per_second(name: str) -> None:
    cost, update = header_of(name)["Cost"], toml_of(name)["update"]
    epochs = update["epochs"] + update["cooldown_epochs"]
    images = (IN_22K if "22k" in name else IN_1K)[0]
    reported = re.search(r"([\d,]+) hours of one RTX", cost)
    throughput = re.search(r"([\d.]+)\s+images/s", cost)
    work = re.search(r"([\d.]+) GFLOP an image .* ([\d.]+) TFLOP/s", cost)
    assert reported, cost
    assert throughput or work, cost
    seconds = 1 / float(throughput[1]) if throughput else float(work[1]) / float(work[2]) / 1000  # type: ignore[index]
    assert f"{epochs} epochs" in cost
    assert "an estimate" in cost
    assert float(reported[1].replace(",", "")) == pytest.approx(images * epochs * seconds / 3600, rel=0.02)


# Memory, in bytes per parameter


@pytest.mark.parametrize(
    ("flags", "ranks", "bytes_per_parameter"),
    [
        (["--opt", "fusedlamb"], 8, 16),
        (["--opt", "sgd", "--ema-decay", "0.9"], 8, 16),
        (["--shard-optimizer"], 1, 20),
        (["--shard-optimizer"], 8, 8 + (8 + 4) / 8),
        (["--opt", "sgd", "--shard-optimizer", "--ema-decay", "0.9"], 4, 8 + (4 + 4) / 4 + 4),
    ],
)
def test_memory_depends_on_optimizer_and_ranks(
    flags: list[str], ranks: int, bytes_per_parameter: float
) -> None:
    config = parse(["--recipe", "volo_d5", *flags]).config
    reported = properties_in(describe(config, ranks, configured("volo_d5")[1]))
    expected = bytes_per_parameter * PARAMETERS["volo_d5"] / GIB
    assert reported["memory"].startswith(f"about {expected:.1f} GiB of state and ")


@pytest.mark.parametrize(
    ("name", "flags", "gpu"),
    [
        ("volo_d5_448", ["-b", "8"], "a GPU of 24 GB"),
        ("volo_d5", ["-b", "256"], "a GPU of 80 GB"),
        ("volo_d5_448", ["-b", "64", "--grad-checkpoint"], "a GPU of 24 GB"),
        ("volo_d5_448", ["-b", "256"], "more than a GPU of 141 GB has; use a smaller --batch-size"),
    ],
)
def test_the_smallest_gpu_with_enough_memory_is_named(name: str, flags: list[str], gpu: str) -> None:
    config = parse(["--recipe", name, *flags]).config
    assert f" per rank: {gpu}" in properties_in(describe(config, 8, measure_workload(config)))["memory"]


@pytest.mark.parametrize("name", ["volo_d5_448", "lvvit_s"])
def test_the_estimate_of_memory_is_the_same_every_time(name: str) -> None:
    config = parse(["--recipe", name]).config
    assert len({measure_workload(config).activation_bytes for _ in range(3)}) == 1


@pytest.mark.parametrize(("name", "blocks"), [("volo_d1", 20), ("lvvit_s", 16)])
def test_checkpointed_blocks_save_only_their_input(name: str, blocks: int) -> None:
    """A checkpointed block saves one tensor of the size of its input, another block ten or more."""
    plain = configured(name)[1].activation_bytes
    checkpointed = measure_workload(parse(["--recipe", name, "--grad-checkpoint"]).config).activation_bytes
    tokens = 196 * 384 * 2  # bytes of the smallest input of a block, in 16 bits
    assert blocks * tokens < checkpointed < plain / 2.5
