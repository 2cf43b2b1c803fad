"""Every recipe: its dry run and what its header states."""

import re
import shlex
import tomllib
from functools import cache
from typing import Any

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import RECIPES, recipe_names
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import config_warnings
from horovod_volo.dry_run import Workload, describe, dry_run, measure_workload
from horovod_volo.optim.schedule import SCHEDULES, lr_at

RANKS = (1, 40)
GIB = 2**30
# Parameters, and the published peak learning rate and global batch, or those in the header if nothing was
# published. Segmentation has 150 classes: a dry run without images does not know that Cityscapes has 19.
PUBLISHED: dict[str, tuple[int, float, int]] = {
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
    "lvvit_l_upernet": (208_738_476, 6e-5, 16),
    "lvvit_m_upernet": (77_274_988, 6e-5, 16),
    "lvvit_s_upernet": (44_452_076, 6e-5, 16),
    "upernet_volo_d1": (66_173_764, 6e-5, 16),
    "upernet_volo_d1_cityscapes": (67_353_412, 6e-5, 8),
    "upernet_volo_d2": (97_327_004, 6e-5, 16),
    "upernet_volo_d3": (124_973_740, 6e-5, 16),
    "upernet_volo_d4": (228_570_700, 6e-5, 16),
    "upernet_volo_d5": (328_703_932, 6e-5, 16),
    "ssd300_resnet34": (19_975_222, 0.0832, 1024),
    "ssd300_resnet50": (22_894_902, 0.0832, 1024),
    "ssd320_volo_d1": (32_726_414, 4e-4, 256),
}
DENSE = [name for name in PUBLISHED if "upernet" in name or name.startswith("ssd")]
# One process, other weights than random ones, or a global batch.
FROM_WEIGHTS = ["finetune_folder", "linear_probe", "transfer_small"]
FOR_ONE_GPU = [*FROM_WEIGHTS, "volo_d1_12gb"]
DEMOS = ["demo", "fast_small", "segmentation_demo", "detection_demo"]


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


def test_every_recipe_is_tested_here() -> None:
    assert sorted([*PUBLISHED, *FOR_ONE_GPU, *DEMOS]) == sorted(recipe_names())
    for name in recipe_names():
        assert {"What", "Published", "Source", "Command", "Cost"} <= header_of(name).keys(), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dry_run_computes_the_properties_of_the_recipe(name: str) -> None:
    recipe, (parameters, peak, published_batch) = toml_of(name), PUBLISHED[name]
    update, per_rank = recipe["update"], recipe["data"]["batch_size"]
    known = {"22k": (14_197_122, 21_841), "upernet": (20_210, 150), "ssd": (117_266, 80)}
    images, classes = next((found for part, found in known.items() if part in name), (1_281_167, 1_000))
    averages = {"adamw": 2, "lars": 1, "sgd": 1}[update.get("opt", "adamw")]
    floats = 2 + averages + ("ema_decay" in update)  # weights, gradients, optimizer, averaged weights
    config, workload = configured(name)
    for ranks in (*RANKS, published_batch // per_rank):
        reported = properties_in(describe(config, ranks, workload))
        batch = ranks * per_rank
        steps = images // batch * (update["epochs"] + update["cooldown_epochs"])
        assert reported["ranks"] == str(ranks)
        assert reported["model"].split(", ")[1] == f"{parameters:,} parameters"
        assert reported["images"] == f"{images:,} of {classes:,} classes"
        assert reported["batch"].startswith(f"{batch:,} images per step = {ranks} ranks x ")
        scaled = update["lr_base"] * batch / update["lr_base_size"]
        assert reported["lr"].split(" = ")[0] == f"peak {scaled:.3g}"
        assert f" = {steps:,} steps (" in reported["length"]
        state, activations = re.findall(r"([\d.]+) GiB", reported["memory"])
        assert state == f"{4 * floats * parameters / GIB:.1f}"
        assert 0.5 < float(activations) < 60
    # The last is the published batch: nothing is scaled, so --warmup-lr and --min-lr are not shown.
    assert batch == published_batch
    assert reported["lr"] == f"peak {peak:.3g} = {peak:.3g} x {batch} / {batch}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_header_agrees_with_the_recipe(name: str) -> None:
    header, recipe, batch = header_of(name), toml_of(name), PUBLISHED[name][2]
    command, update = shlex.split(header["Command"]), recipe["update"]
    ranks = int(command[command.index("-np") + 1])
    start = f"horovodrun -np {ranks} horovod-volo train".split()
    assert command[: len(start)] == start
    request = parse([*command[len(start) :], "--dry-run"])
    assert request.config.run.name == name
    assert config_warnings(request.config) == []
    assert request.config.model.img_size == recipe["model"]["img_size"]
    per_rank = recipe["data"]["batch_size"]
    assert ranks * per_rank == batch == update["lr_base_size"]
    assert header["Batch"].startswith(f"{ranks} ranks x {per_rank} = {batch}")
    inputs = ("--token-label-data", "--finetune", "--ground-truth")
    given = {flag[2:].replace("-", "_") for flag in inputs if flag in command}
    assert ("finetune" in given) == (name in DENSE or update["weight_decay"] == 1e-8)
    published = recipe.get("published", {})
    assert bool(published) == name.startswith(("volo_", "lvvit_", "upernet_", "ssd"))
    assert set(published.get("needs", [])) == given
    accuracy = re.match(r"([\d.]+) % top-1", header["Published"])
    assert published.get("top1") == (float(accuracy[1]) if accuracy else None)
    if name in DENSE:
        assert f"at {recipe['model']['img_size']} px, {update['epochs']} epochs" in header["What"]
    if "upernet" in name:
        images, steps = (2_975, 80_000) if "cityscapes" in name else (20_210, 160_000)
        assert f"({steps:,} steps of {batch} images)" in header["What"]
        assert update["epochs"] * (images // batch) == pytest.approx(steps, rel=0.005)


def test_the_learning_rate_of_ssd_is_divided_before_epochs_43_and_54() -> None:
    decay = SCHEDULES.find(toml_of("ssd300_resnet50")["update"]["sched"])
    steps = {"warmup": 114, "decay_steps": 65 * 114}
    rates = [lr_at(114 * epoch, decay=decay, peak=1.0, start=0.0, floor=0.0, **steps) for epoch in range(65)]
    assert rates[:2] == [0.0, 1.0]
    assert rates[42:44] == [1.0, 0.1]
    assert rates[53:] == pytest.approx([0.1, *[0.01] * 11])


# Memory, in bytes per parameter


@pytest.mark.parametrize(
    ("flags", "ranks", "bytes_per_parameter"),
    [
        (["--opt", "fusedlamb"], 8, 16),
        (["--shard-optimizer"], 8, 8 + (8 + 4) / 8),
        (["--opt", "sgd", "--shard-optimizer", "--ema-decay", "0.9"], 4, 8 + (4 + 4) / 4 + 4),
    ],
)
def test_memory_depends_on_optimizer_and_ranks(flags, ranks, bytes_per_parameter):
    config = parse(["--recipe", "volo_d5", *flags]).config
    reported = properties_in(describe(config, ranks, configured("volo_d5")[1]))
    expected = bytes_per_parameter * PUBLISHED["volo_d5"][0] / GIB
    assert reported["memory"].startswith(f"about {expected:.1f} GiB of state and ")


def test_checkpointed_blocks_save_only_their_input() -> None:
    """A checkpointed block saves one tensor of the size of its input, another block ten or more."""
    config, workload = configured("volo_d1")
    plain = workload.activation_bytes
    assert measure_workload(config).activation_bytes == plain  # the same every time
    flags = ["--recipe", "volo_d1", "--grad-checkpoint"]
    checkpointed = measure_workload(parse(flags).config).activation_bytes
    tokens = 196 * 384 * 2  # bytes of the smallest input of its 20 blocks, in 16 bits
    assert 20 * tokens < checkpointed < plain / 2.5


# Recipes for one GPU


@pytest.mark.parametrize("name", FOR_ONE_GPU)
def test_a_recipe_is_for_one_process_and_begins_with_the_weights_of_the_authors(name: str) -> None:
    header, recipe = header_of(name), toml_of(name)
    command = shlex.split(header["Command"])
    assert command[:2] == ["horovod-volo", "train"]
    config = parse(command[2:]).config
    assert config.run.name == name
    assert config.update.lr_base_size == recipe["data"].get("global_batch", config.data.batch_size)
    assert config_warnings(config) == []
    assert header["Batch"].startswith(f"1 rank x {config.data.batch_size}")
    assert "horovodrun" not in (RECIPES / f"{name}.toml").read_text(encoding="utf-8")
    if name in FROM_WEIGHTS:
        assert recipe["model"]["finetune"] == "timm:volo_d1_224.sail_in1k"
        text = dry_run(parse(["--recipe", name, "--num-classes", "102"]).config, 1)
        assert "warning  " in text  # on the number of images, which is assumed
        assert "has no effect" not in text


def test_on_twelve_gigabytes_the_published_batch_is_accumulated() -> None:
    name, (config, workload) = "volo_d1_12gb", configured("volo_d1_12gb")
    reported = properties_in(describe(config, 1, workload))
    assert reported["batch"] == "1,024 images per step = 1 ranks x 64 images x 16 micro-batches"
    assert reported["lr"] == "peak 0.0016 = 0.0016 x 1024 / 1024"
    assert reported["memory"].endswith("a GPU of 12 GB")
    assert workload.scalars() == PUBLISHED["volo_d1"][0]
    recipe, published = toml_of(name), toml_of("volo_d1")
    own = {"batch_size": 64, "global_batch": 1024}
    assert recipe["data"] == published["data"] | own
    assert {**recipe, "data": {}} == {
        key: {} if key == "data" else table for key, table in published.items() if key != "exchange"
    }
