"""A stated setting that has no effect beside the others, or in this run, is a warning that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from schema_examples import COMPANIONS, FIELDS, MAPS, examples, recipe_of, words

from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import Config, all_settings
from horovod_volo.config.validation import CONDITIONS, RunFacts, config_warnings, holds, is_set
from horovod_volo.dry_run import dry_run
from horovod_volo.optim.build import OPTIMIZERS

# A setting, why it has no effect, the flags or facts of a run in which this is so, and those of another.
REMOTE = "https://host/shards"
CONSTANT = "with --sched constant and --cooldown-epochs 0"
PLUGINS_LOSS = "unless the plugin's --loss reads it"
RESUMED, NEW = RunFacts(first_step=10, total_steps=100), RunFacts(total_steps=100)
WITHOUT_EFFECT: list[tuple[str, str, str | RunFacts, str | RunFacts]] = [
    ("--compression none", "with one rank", RunFacts(ranks=1), RunFacts(ranks=2)),
    ("--shard-optimizer", "with one rank", RunFacts(ranks=1), RunFacts(ranks=2)),
    ("--kernels plain", "on a CPU", RunFacts(device_type="cpu"), RunFacts(device_type="cuda")),
    ("--finetune w", "in a run that resumes from a checkpoint", RESUMED, NEW),
    ("--use-ema --finetune w", "in a run that resumes from a checkpoint", RESUMED, NEW),
    ("--stop-at-step 9", "outside of the steps that this run makes", RESUMED, NEW),
    ("--stop-at-step 101", "outside of the steps that this run makes", NEW, RunFacts(total_steps=101)),
    (
        "--early-stop 3",
        "with so few evaluations (--epochs, --eval-every)",
        "--epochs 31 --eval-every 10",  # 4
        "--epochs 41 --eval-every 10",
    ),
    ("--cache-dir blocks", "without shards on a server", "", REMOTE),
    ("--cache-gib 8", "without --cache-dir", REMOTE, f"{REMOTE} --cache-dir x"),
    ("--color-jitter 0.3", "with --aa, unless it is 3a", "--aa original", "--aa 3a"),
    ("--randaugment-on image", "without --aa or --color-jitter", "--aa= --color-jitter 0", "--aa="),
    ("--momentum 0.8", "with Adam and LAMB", "", "--opt lars"),
    ("--momentum 0.8", "unless the plugin's --opt reads it", "--opt mine", "--opt sgd"),
    ("--min-lr 2e-6 --sched constant", CONSTANT, "--cooldown-epochs 0", ""),
    ("--smoothing 0.2", PLUGINS_LOSS, "--loss mine", "--loss bce"),
    ("--ground-truth", PLUGINS_LOSS, f"{MAPS} --loss mine", MAPS),
    ("--dense-weight 2", f"above 0, {PLUGINS_LOSS}", "--token-label --loss mine", "--token-label"),
    ("--dense-weight 2", "without --token-label", "--loss mine", "--token-label"),
    ("--map-geometry whole", "with --label-geometry reference", f"{MAPS} --label-geometry reference", MAPS),
    ("--lr-base-size 512", "with --lr", "--lr 1e-3", "--lr 0"),
    ("--remode rand", "with --reprob 0", "--reprob 0", "--reprob 0.5"),
    ("--bad-samples-limit 3", "with --bad-samples fail", "--bad-samples fail", ""),
    ("--decay-rate 0.2", "without --sched step", "", "--sched step"),
    ("--warmup-epochs 5", "with --sched one-cycle", "--sched one-cycle", "--sched cosine"),
    ("--warmup-prefix", "with --warmup-epochs 0", "--warmup-epochs 0", "--warmup-epochs 3"),
    ("--mixup-prob 0.5", "without --mixup or --cutmix", "", "--cutmix 1 --no-mix-token"),
    ("--mixup-switch-prob 0.7 --no-mix-token", "without --cutmix", "--mixup 1", "--mixup 1 --cutmix 1"),
    ("--catalog-dir x", "with --task segmentation", "--task segmentation", "--task detection"),
    ("--test-stride 9 --task segmentation", "with --test-mode whole", "", "--test-mode slide"),
]


@pytest.mark.parametrize(("stated", "why", "without", "with_effect"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_named(
    stated: str, why: str, without: str | RunFacts, with_effect: str | RunFacts, tmp_path: Path
) -> None:
    def warnings(flags: str, of_run: str | RunFacts) -> list[str]:
        argv, run = (of_run, RunFacts()) if isinstance(of_run, str) else ("", of_run)
        config = parse([*flags.split(), *argv.split()]).config
        found = config_warnings(config, run)
        # The run's own resolved.toml is warned of likewise.
        again = parse(["--recipe", recipe_of(tmp_path, dump(config))]).config
        assert config_warnings(again, run) == found
        return found

    warning = f"{stated.split()[0]} has no effect {why}"
    assert warning in warnings(stated, without)
    assert warning not in warnings(stated, with_effect)


def test_every_condition_of_the_schema_can_be_read() -> None:
    for setting in all_settings():
        for condition in setting.idle:
            assert condition in CONDITIONS or condition.split()[0] in ("with", "without")
            holds(condition, Config())  # names flags that there are
        for flag in filter(None, (setting.needs, *setting.excludes)):
            is_set(flag, Config())
    tested = {why for _, why, *_ in WITHOUT_EFFECT}
    assert tested >= CONDITIONS.keys()


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
    alone_on_a_cpu = RunFacts(ranks=1, device_type="cpu")
    for argv in (
        "--momentum 0.9 --compression fp16 --kernels auto",
        "--sched one-cycle --epochs 30",
        "--token-label --loss mine --dense-weight 0",  # 0 leaves out the auxiliary head, whatever the loss is
        f"--recipe {recipe_of(tmp_path, dump(Config()))}",
    ):
        assert config_warnings(parse(argv.split()).config, alone_on_a_cpu) == []


def test_the_optimizers_with_and_without_momentum_are_the_registered_ones() -> None:
    for name in OPTIMIZERS.names():
        warnings = config_warnings(parse(["--momentum", "0.8", "--opt", name]).config)
        has_momentum = name in ("sgd", "lars", "muon")
        assert warnings == ([] if has_momentum else ["--momentum has no effect with Adam and LAMB"])


def test_a_dry_run_names_what_has_no_effect_on_its_ranks() -> None:
    config = parse(["--model", "volo_demo", "--img-size", "64", "--shard-optimizer"]).config
    assert "warning  --shard-optimizer has no effect with one rank" in dry_run(config, 1)
    assert "--shard-optimizer has no effect" not in dry_run(config, 2)
