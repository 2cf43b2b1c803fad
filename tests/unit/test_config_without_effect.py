"""A stated setting that has no effect beside the others, or in this run, is a warning that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from schema_examples import COMPANIONS, FIELDS, MAPS, examples, recipe_of, words

from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import FACTS, ON_CPU, ONE_RANK, RESUMED, Config, all_settings
from horovod_volo.config.validation import CONDITIONS, config_warnings, holds, is_set
from horovod_volo.dry_run import dry_run
from horovod_volo.optim.build import OPTIMIZERS

# A setting, why it has no effect, the flags or fact of a run in which this is so, and flags of another.
REMOTE = "https://host/shards"
WITHOUT_EFFECT = [
    ("--compression none", ONE_RANK, ONE_RANK, ""),
    ("--kernels plain", ON_CPU, ON_CPU, ""),
    ("--finetune w", RESUMED, RESUMED, ""),
    ("--use-ema --finetune w", RESUMED, RESUMED, ""),
    ("--cache-dir blocks", "without shards on a server", "", REMOTE),
    ("--cache-gib 8", "without --cache-dir", REMOTE, f"{REMOTE} --cache-dir x"),
    ("--color-jitter 0.3", "with --aa", "", "--aa="),
    ("--randaugment-on image", "without --aa or --color-jitter", "--aa= --color-jitter 0", "--aa="),
    ("--map-geometry whole", "with --label-geometry reference", f"{MAPS} --label-geometry reference", MAPS),
    ("--lr-base-size 512", "with --lr", "--lr 1e-3", "--lr 0"),
    ("--remode rand", "with --reprob 0", "--reprob 0", "--reprob 0.5"),
    ("--decay-rate 0.2", "without --sched step", "", "--sched step"),
    ("--mixup-prob 0.5", "without --mixup or --cutmix", "", "--cutmix 1 --no-mix-token"),
    ("--mixup-switch-prob 0.7 --no-mix-token", "without --cutmix", "--mixup 1", "--mixup 1 --cutmix 1"),
]


@pytest.mark.parametrize(("stated", "why", "without", "with_effect"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_named(
    stated: str, why: str, without: str, with_effect: str, tmp_path: Path
) -> None:
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
            assert {condition} & {*CONDITIONS, *FACTS} or condition.split()[0] in ("with", "without")
            holds(condition, Config())  # names flags that there are
        for flag in filter(None, (setting.needs, *setting.excludes)):
            is_set(flag, Config())
    assert {why for _, why, *_ in WITHOUT_EFFECT} >= {*CONDITIONS, *FACTS}


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
