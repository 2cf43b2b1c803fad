"""What follows from settings: batches, steps and learning rates; and which stated settings have no effect."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from schema_examples import COMPANIONS, FIELDS, MAPS, examples, recipe_of, words

from horovod_volo.config.command_line import parse
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.recipe import assemble, dump
from horovod_volo.config.schema import FACTS, ON_CPU, ONE_RANK, RESUMED, Config, all_settings
from horovod_volo.config.validation import NO_SERVER, config_warnings, holds, is_set
from horovod_volo.core.errors import UserError
from horovod_volo.dry_run import dry_run
from horovod_volo.optim.build import OPTIMIZERS

IMAGENET = 1_281_167


def config(**chosen: Any) -> Config:
    return assemble(chosen, fallback_name="")


@pytest.mark.parametrize(
    ("ranks", "batch", "accumulation", "images", "global_batch", "steps", "peak"),
    [
        (8, 128, 1, IMAGENET, 1024, 1251, 1.6e-3),
        (40, 25, 1, IMAGENET, 1000, 1281, 1.6e-3 * 1000 / 1024),  # forty ranks do not divide 1024
        (40, 6, 4, IMAGENET, 960, 1334, 1.5e-3),
        (8, 16, 8, IMAGENET, 1024, 1251, 1.6e-3),  # the batch of the first, in eight passes
        (1, 32, 1, 100, 32, 3, 5e-5),  # four images are left out of each epoch
        (3, 7, 2, 85, 42, 2, 6.5625e-5),
    ],
)
def test_a_run_takes_its_shape(ranks, batch, accumulation, images, global_batch, steps, peak):
    derived = derive(config(batch_size=batch, accumulation=accumulation), ranks=ranks, images=images)
    assert (derived.ranks, derived.global_batch, derived.steps_per_epoch) == (ranks, global_batch, steps)
    assert (derived.epochs, derived.total_steps, derived.decay_steps) == (310, 310 * steps, 300 * steps)
    assert (derived.warmup_steps, derived.prefix_steps) == (20 * steps, 0)  # it is inside
    assert derived.peak_lr == pytest.approx(peak, rel=1e-12)


def test_a_warm_up_that_comes_before_makes_the_run_longer() -> None:
    given = config(epochs=10, warmup_epochs=3, cooldown_epochs=2, warmup_prefix=True, batch_size=10)
    derived = derive(given, ranks=1, images=40)
    assert (derived.epochs, derived.total_steps) == (15, 60)
    assert (derived.warmup_steps, derived.prefix_steps, derived.decay_steps) == (12, 12, 40)
    assert [derived.epoch_of(step) for step in (0, 3, 4, 9)] == [(0, 0), (0, 3), (1, 0), (2, 1)]


# Ranks, images and settings of a run whose step is too large, and the value that the error names.
@pytest.mark.parametrize(
    ("ranks", "images", "chosen", "name", "largest"),
    [
        (2, 200, {"batch_size": 128}, "batch_size", 100),
        (4, 119, {"batch_size": 10, "accumulation": 3}, "batch_size", 9),
        (3, 21, {"batch_size": 1000, "accumulation": 7}, "batch_size", 1),
        (8, 79, {"global_batch": 80}, "global_batch", 72),
    ],
)
def test_a_step_of_more_than_all_images_names_the_largest_that_works(ranks, images, chosen, name, largest):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UserError, match=f"there are {images}.* Use {flag} {largest} or less"):
        derive(resolve(config(**chosen), ranks), ranks=ranks, images=images)
    fitting = resolve(config(**{**chosen, name: largest}), ranks)
    assert derive(fitting, ranks=ranks, images=images).steps_per_epoch == 1


def test_more_ranks_than_images_asks_for_fewer_ranks() -> None:
    with pytest.raises(UserError, match="Start at most 7 ranks with --accumulation 1"):
        derive(config(batch_size=1), ranks=8, images=7)
    assert derive(config(batch_size=1), ranks=7, images=7).global_batch == 7


# Learning rates at another batch, and where they cross


def rates(ranks: int, **chosen: Any) -> tuple[float, float, float]:
    derived = derive(config(**chosen), ranks=ranks, images=IMAGENET)
    return derived.peak_lr, derived.min_lr, derived.warmup_lr


@pytest.mark.parametrize("ranks", [1, 3, 8, 40, 256])
def test_all_three_rates_are_scaled_alike_unless_they_are_given(ranks: int) -> None:
    stated = {"lr_base": 8e-6, "min_lr": 4e-6, "warmup_lr": 1e-6, "batch_size": 30}
    at_stated = rates(ranks, lr_base_size=30 * ranks, **stated)
    assert at_stated == (8e-6, 4e-6, 1e-6)  # to the bit
    scale = ranks * 30 / 240
    scaled = rates(ranks, lr_base_size=240, **stated)
    assert scaled == pytest.approx([each * scale for each in at_stated], rel=1e-12)
    assert rates(ranks, lr=5e-6, **stated) == (5e-6, 4e-6, 1e-6)


@pytest.mark.parametrize(
    ("ranks", "chosen", "flag"),
    [
        (8, {"lr": 5e-6}, "--min-lr"),  # the default, 1e-5, is above
        (8, {"lr": 5e-7, "min_lr": 1e-7}, "--warmup-lr"),
        (8, {"lr_base": 1e-5, "min_lr": 2e-5}, "--min-lr"),
        # Ends that are not scaled: the peak falls below them with the batch.
        (40, {"lr_base": 1e-5, "lr_base_size": 0, "min_lr": 4e-6, "batch_size": 8}, "--min-lr"),
        (8, {"lr_base": 1e-5, "lr_base_size": 0, "min_lr": 0.0, "batch_size": 8}, "--warmup-lr"),
    ],
)
def test_rates_that_cross_are_refused_before_anything_is_read(ranks, chosen, flag):
    with pytest.raises(UserError, match=f"below {flag}, which is") as raised:
        resolve(config(**chosen), ranks)
    with pytest.raises(UserError, match=flag):
        derive(config(**chosen), ranks=ranks, images=IMAGENET)
    match = re.search(rf"Use {flag} (\S+) or less", str(raised.value))
    named = float(match[1])
    setting = flag[2:].replace("-", "_")
    resolve(config(**{**chosen, setting: named}), ranks)
    with pytest.raises(UserError):
        resolve(config(**{**chosen, setting: named * 1.001}), ranks)
    if flag == "--warmup-lr":  # which is not used then
        resolve(config(**chosen, warmup_epochs=0), ranks)


# A global batch that is given


@pytest.mark.parametrize(
    ("ranks", "largest", "wanted", "batch", "passes"),
    [
        (8, 128, 1024, 128, 1),
        (40, 128, 1000, 25, 1),
        (8, 127, 1024, 64, 2),
        (2, 7, 20, 5, 2),
        (40, 8, 520, 1, 13),  # 13 images a rank are not two or more equal halves
        (4, 1, 12, 1, 3),
    ],
)
def test_a_global_batch_is_the_fewest_passes_that_fit(ranks, largest, wanted, batch, passes):
    found = resolve(config(batch_size=largest, global_batch=wanted), ranks)
    assert (found.data.batch_size, found.update.accumulation) == (batch, passes)
    assert derive(found, ranks=ranks, images=IMAGENET).global_batch == wanted
    share = wanted // ranks
    fitting = [count for count in range(1, share + 1) if share % count == 0 and share // count <= largest]
    assert passes == min(fitting)


@pytest.mark.parametrize(
    ("ranks", "argv", "offered"),
    [
        (40, "--global-batch 1024", "1000 = 40 x 25 x 1 micro-batches, peak learning rate 0.00156, or "),
        (40, "--global-batch 1024 -b 16", "1040 = 40 x 13 x 2 micro-batches, peak learning rate 0.00163."),
        (40, "--recipe volo_d5_448 --global-batch 512 -b 13", "peak learning rate 4.69e-06, or"),
        (48, "--global-batch 16", "multiples: --global-batch 48 = 48 x 1 x 1 micro-batches, peak"),
    ],
)
def test_a_global_batch_that_cannot_be_divided_is_offered_the_nearest(ranks, argv, offered):
    with pytest.raises(UserError, match=f"is not a multiple of {ranks} ranks") as raised:
        resolve(parse(argv.split()).config, ranks)
    assert offered in str(raised.value)
    for batch in re.findall(r"--global-batch (\d+) =", str(raised.value)):
        resolve(parse([*argv.split(), "--global-batch", batch]).config, ranks)


def test_resolved_settings_are_a_recipe_that_finds_the_batch_anew(tmp_path: Path) -> None:
    ran = resolve(parse(["--recipe", "volo_d1", "--global-batch", "1040"]).config, 40)
    recipe = recipe_of(tmp_path, dump(ran))
    again = parse(["--recipe", recipe]).config
    assert resolve(again, 40) == ran
    fewer = resolve(again, 20)  # a node is lost: as large a batch of a rank as before
    assert (fewer.data.batch_size, fewer.update.accumulation) == (26, 2)
    expected = replace(derive(ran, ranks=40, images=IMAGENET), ranks=20)
    assert derive(fewer, ranks=20, images=IMAGENET) == expected


def test_passes_are_not_given_beside_a_global_batch(tmp_path: Path) -> None:
    said = "--accumulation follows from --global-batch 1024, .* Leave it out, or add --global-batch 0"
    recipe = recipe_of(tmp_path, "[data]\nglobal_batch = 1024\n[update]\naccumulation = 3\n")
    for argv in (["--global-batch", "1024"], ["--recipe", recipe]):
        with pytest.raises(UserError, match=said):
            parse([*argv, "--accumulation", "2"])
    config = parse(["--recipe", recipe, "--accumulation", "2", "--global-batch", "0"]).config
    assert config.update.accumulation == 2
    assert resolve(parse(["--recipe", recipe]).config, 8).update.accumulation == 1


# A setting, why it has no effect, the flags or fact of a run in which this is so, and flags of another.
REMOTE = "https://host/shards"
WITHOUT_EFFECT = [
    ("--compression none", ONE_RANK, ONE_RANK, ""),
    ("--kernels plain", ON_CPU, ON_CPU, ""),
    ("--finetune w", RESUMED, RESUMED, ""),
    ("--cache-dir blocks", "without shards on a server", "", REMOTE),
    ("--cache-gib 8", "without --cache-dir", REMOTE, f"{REMOTE} --cache-dir x"),
    ("--color-jitter 0.3", "with --aa", "", "--aa="),
    ("--randaugment-on image", "without --aa or --color-jitter", "--aa= --color-jitter 0", "--aa="),
    ("--map-geometry whole", "with --label-geometry reference", f"{MAPS} --label-geometry reference", MAPS),
    ("--lr-base-size 512", "with --lr", "--lr 1e-3", "--lr 0"),
    ("--remode rand", "with --reprob 0", "--reprob 0", "--reprob 0.5"),
    ("--mixup-prob 0.5", "without --mixup or --cutmix", "", "--cutmix 1 --no-mix-token"),
    ("--mixup-switch-prob 0.7 --no-mix-token", "without --cutmix", "--mixup 1", "--mixup 1 --cutmix 1"),
]


@pytest.mark.parametrize(("stated", "why", "without", "with_effect"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_named(stated, why, without, with_effect, tmp_path):
    def warnings(flags: str, of_run: str) -> list[str]:
        argv, facts = ("", [of_run]) if of_run in FACTS else (of_run, [])
        config = parse([*flags.split(), *argv.split()]).config
        found = config_warnings(config, facts)
        # The run's own resolved.toml is warned of likewise.
        again = parse(["--recipe", recipe_of(tmp_path, dump(config))]).config
        assert config_warnings(again, facts) == found
        return found

    warning = f"{stated.split()[0]} has no effect {why}"
    assert warning in warnings(stated, without)
    assert warning not in warnings(stated, with_effect)


def test_every_condition_of_the_schema_can_be_read() -> None:
    for setting in all_settings():
        for condition in setting.idle:
            assert condition in (NO_SERVER, *FACTS) or condition.split()[0] in ("with", "without")
            holds(condition, Config())  # names flags that there are
        for flag in filter(None, (setting.needs, *setting.excludes)):
            is_set(flag, Config())
    assert {why for _, why, *_ in WITHOUT_EFFECT} >= {NO_SERVER, *FACTS}


OWN_TASK = {"segmentation": "segmentation", "detection": "detection", "objective": "classification"}


@pytest.mark.parametrize(
    "name", [name for group, name, _ in FIELDS if group in OWN_TASK] + ["aa", "val_share"]
)
def test_a_setting_of_another_task_is_named(name: str) -> None:
    group, default = next((group, default) for group, field, default in FIELDS if field == name)
    stated = [*words(name, examples(name, default)[0]), *COMPANIONS.get(name, [])]
    own = OWN_TASK.get(group, "classification")
    warning = f"--{name.replace('_', '-')} has no effect without --task {own}"
    for task in OWN_TASK.values():
        found = config_warnings(parse([*stated, "--task", task]).config)
        assert (warning in found) == (task != own)


def test_a_setting_that_nobody_stated_or_that_has_its_default_is_not_named(tmp_path: Path) -> None:
    for argv in (
        "--momentum 0.9 --compression fp16 --kernels auto",
        "--sched step --epochs 30",
        f"--recipe {recipe_of(tmp_path, dump(Config()))}",
    ):
        assert config_warnings(parse(argv.split()).config, [ONE_RANK, ON_CPU]) == []


def test_the_optimizers_with_and_without_momentum_are_the_registered_ones() -> None:
    without_momentum = "with --opt adamw or --opt lamb or --opt fused*"
    for name in OPTIMIZERS.names():
        warnings = config_warnings(parse(["--momentum", "0.8", "--opt", name]).config)
        has_momentum = name in ("sgd", "lars", "muon")
        assert warnings == ([] if has_momentum else [f"--momentum has no effect {without_momentum}"])


def test_a_dry_run_names_what_has_no_effect_on_its_ranks() -> None:
    config = parse(["--model", "volo_demo", "--img-size", "64", "--shard-optimizer"]).config
    assert "warning  --shard-optimizer has no effect with one rank" in dry_run(config, 1)
    assert "--shard-optimizer has no effect" not in dry_run(config, 2)
