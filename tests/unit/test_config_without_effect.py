"""Settings without effect beside what is known of a run: ranks, device, checkpoint, plugins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from schema_examples import COMPANIONS, FIELDS, examples, recipe_of, words
from test_config_mistakes import MAPS, WITHOUT_EFFECT

from horovod_volo.config.command_line import parse
from horovod_volo.config.dense_settings import Detection, Segmentation
from horovod_volo.config.objective_settings import Objective
from horovod_volo.config.recipe import dump
from horovod_volo.config.validation import config_warnings
from horovod_volo.config.values import all_settings
from horovod_volo.config.without_effect import _IDLE, _OF_CLASSIFICATION, NOTHING_KNOWN, RunFacts
from horovod_volo.dry_run import dry_run
from horovod_volo.optim.build import OPTIMIZERS

FINETUNE = ["--finetune", "weights.pth"]
ONE_RANK, TWO_RANKS = RunFacts(ranks=1), RunFacts(ranks=2)
CPU, GPU = RunFacts(device_type="cpu"), RunFacts(device_type="cuda")
RESUMED, NEW = RunFacts(first_step=10, total_steps=100), RunFacts(total_steps=100)
REFERENCE = ["--label-geometry", "reference"]

OF_TASKS = {
    "segmentation": [field.name for field in dataclasses.fields(Segmentation)],
    "detection": [field.name for field in dataclasses.fields(Detection)],
    "classification": [*(field.name for field in dataclasses.fields(Objective)), *_OF_CLASSIFICATION],
}

# What is stated, why it has no effect, the run for which this is so, and one for which it has an effect.
IN_SOME_RUNS = [
    (["--shard-optimizer"], "with one rank", ONE_RANK, TWO_RANKS),
    (["--compression", "none"], "with one rank", ONE_RANK, TWO_RANKS),
    (["--bucket-mib", "8"], "with one rank", ONE_RANK, TWO_RANKS),
    (["--last-bucket-mib", "2"], "with one rank", ONE_RANK, TWO_RANKS),
    (["--horovod-autotune", "log.csv"], "with one rank", ONE_RANK, TWO_RANKS),
    (["--horovod-timeline", "line.json"], "with one rank", ONE_RANK, TWO_RANKS),
    (["--kernels", "plain"], "on a CPU", CPU, GPU),
    (FINETUNE, "in a run that resumes from a checkpoint", RESUMED, NEW),
    (["--use-ema", *FINETUNE], "in a run that resumes from a checkpoint", RESUMED, NEW),
    (["--allow-mismatch", "head", *FINETUNE], "in a run that resumes from a checkpoint", RESUMED, NEW),
    (["--stop-at-step", "9"], "outside of the steps that this run makes", RESUMED, NEW),
    (["--stop-at-step", "101"], "outside of the steps that this run makes", NEW, RunFacts(total_steps=101)),
]

# What is stated, why it has no effect, the flags with which this is so, and those with which it has one.
REMOTE = ["https://host/shards"]
BESIDE_OTHERS = [
    (["--cache-dir", "blocks"], "without shards on a server", [], REMOTE),
    (["--cache-gib", "8"], "without shards on a server", ["--cache-dir", "x"], [*REMOTE, "--cache-dir", "x"]),
    (["--cache-gib", "8"], "without --cache-dir", REMOTE, [*REMOTE, "--cache-dir", "x"]),
    (["--momentum", "0.8"], "unless the plugin's --opt mine reads it", ["--opt", "mine"], ["--opt", "sgd"]),
    (["--cls-weight", "2"], "unless the plugin's --loss mine reads it", ["--loss", "mine"], []),
    (["--smoothing", "0.2"], "unless the plugin's --loss mine reads it", ["--loss", "mine"], []),
    (["--ground-truth"], "unless the plugin's --loss mine reads it", [*MAPS, "--loss", "mine"], MAPS),
    (
        ["--dense-weight", "2"],
        "unless the plugin's --loss mine reads it",
        ["--token-label", "--loss", "mine"],
        ["--token-label"],
    ),
    (
        ["--grad-checkpoint-stages", "outlookers"],
        "without --grad-checkpoint",
        [],
        ["--grad-checkpoint"],
    ),
    (
        ["--map-geometry", "whole"],
        "with --label-geometry reference, which reads every map as the whole image",
        [*MAPS, *REFERENCE],
        MAPS,
    ),
    (
        ["--test-stride", "100", "--task", "segmentation"],
        "with --test-mode whole",
        ["--epochs", "30"],
        ["--test-mode", "slide"],
    ),
    (
        ["--early-stop", "3"],
        "with so few evaluations (--epochs, --eval-every)",
        ["--epochs", "31", "--eval-every", "10"],  # 4
        ["--epochs", "41", "--eval-every", "10"],
    ),
    (
        ["--min-lr", "2e-6"],
        "with --sched constant and --cooldown-epochs 0",
        ["--sched", "constant", "--cooldown-epochs", "0"],
        ["--sched", "constant"],
    ),
]


@pytest.mark.parametrize(("stated", "why", "without", "with_effect"), IN_SOME_RUNS)
def test_a_setting_without_effect_in_this_run_is_named(
    stated: list[str], why: str, without: RunFacts, with_effect: RunFacts, tmp_path: Path
) -> None:
    config = parse(stated).config
    warning = f"{stated[0]} has no effect {why}"
    assert warning in config_warnings(config, without)
    assert warning not in config_warnings(config, with_effect)
    assert warning not in config_warnings(config, NOTHING_KNOWN)
    assert config_warnings(parse([]).config, without) == []  # nobody stated it
    recipe = recipe_of(tmp_path, dump(config))
    assert warning in config_warnings(parse(["--recipe", recipe]).config, without)


@pytest.mark.parametrize(("stated", "why", "without", "with_effect"), BESIDE_OTHERS)
def test_a_setting_without_effect_beside_others_is_named(
    stated: list[str], why: str, without: list[str], with_effect: list[str]
) -> None:
    warning = f"{stated[0]} has no effect {why}"
    assert warning in config_warnings(parse([*stated, *without]).config)
    assert warning not in config_warnings(parse([*stated, *with_effect]).config)
    assert warning not in config_warnings(parse(without).config)


@pytest.mark.parametrize(
    ("name", "own"), [(name, task) for task, names in OF_TASKS.items() for name in names]
)
def test_a_setting_of_another_task_is_named(name: str, own: str) -> None:
    default = next(default for _, field, default in FIELDS if field == name)
    stated = [*words(name, examples(name, default)[0]), *COMPANIONS.get(name, [])]
    for task in OF_TASKS:
        warning = f"--{name.replace('_', '-')} has no effect with --task {task}"
        found = config_warnings(parse([*stated, "--task", task]).config)
        assert (warning in found) == (task != own)


def test_segmentation_keeps_no_list_of_images() -> None:
    for task, warned in (("segmentation", True), ("detection", False), ("classification", False)):
        found = config_warnings(parse(["--catalog-dir", "lists", "--task", task]).config)
        assert (f"--catalog-dir has no effect with --task {task}" in found) == warned


def test_a_setting_that_has_its_default_is_not_named() -> None:
    config = parse(["--momentum", "0.9", "--compression", "fp16", "--kernels", "auto"]).config
    assert config_warnings(config, RunFacts(ranks=1, device_type="cpu")) == []


def test_a_warm_up_that_nobody_stated_is_not_named() -> None:
    assert config_warnings(parse(["--sched", "one-cycle", "--epochs", "30"]).config) == []


def test_without_token_labels_the_weight_of_their_loss_gets_one_warning() -> None:
    config = parse(["--dense-weight", "2", "--loss", "mine"]).config
    assert config_warnings(config) == ["--dense-weight has no effect without --token-label"]


def test_zero_leaves_out_the_auxiliary_head_whatever_the_loss_is() -> None:
    assert config_warnings(parse(["--token-label", "--loss", "mine", "--dense-weight", "0"]).config) == []


def test_the_optimizers_with_and_without_momentum_are_the_registered_ones() -> None:
    of_plugin = "--momentum has no effect unless the plugin's --opt {} reads it"
    for name in OPTIMIZERS.names():
        warnings = config_warnings(parse(["--momentum", "0.8", "--opt", name]).config)
        assert of_plugin.format(name) not in warnings
        assert warnings == (
            [] if name in ("sgd", "lars", "muon") else [f"--momentum has no effect with --opt {name}"]
        )


def test_every_row_of_the_table_is_tested() -> None:
    tested = {(stated[0], why) for stated, why, *_ in [*WITHOUT_EFFECT, *IN_SOME_RUNS, *BESIDE_OTHERS]}
    # Only a recipe can state both: test_what_a_recipe_states_is_warned_of_unless_it_is_the_default.
    tested.add(("--accumulation", "with --global-batch, which sets it"))
    flags = {setting.name: setting.flag for setting in all_settings()}
    tested |= {(flags[name], "with --task ") for names in OF_TASKS.values() for name in names}
    tested.add((flags["catalog_dir"], "with --task "))
    names = [(flags[name], row.because) for row in _IDLE for name in row.names]
    untested = [
        (flag, because)
        for flag, because in names
        if not any(flag == stated and why.startswith(because.split("{")[0]) for stated, why in tested)
    ]
    assert untested == []


def test_a_dry_run_names_what_has_no_effect_on_its_ranks() -> None:
    config = parse(["--model", "volo_demo", "--img-size", "64", "--shard-optimizer"]).config
    assert "warning  --shard-optimizer has no effect with one rank" in dry_run(config, 1)
    assert "--shard-optimizer has no effect" not in dry_run(config, 2)
