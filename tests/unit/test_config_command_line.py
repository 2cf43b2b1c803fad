"""The command line is the schema: its help, its spellings, and default < recipe < flag."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from schema_examples import COMPANIONS, FIELDS, NAMES, examples, recipe_of, value_of, words

from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import assemble, dump
from horovod_volo.config.schema import Config


def test_nothing_given_is_the_schema_itself() -> None:
    request = parse([])
    assert request.config == dataclasses.replace(
        Config(), run=dataclasses.replace(Config().run, name="volo_d1")
    )
    assert (request.dry_run, request.ranks) == (False, 0)


@pytest.mark.parametrize(("group", "name", "default"), FIELDS, ids=NAMES)
def test_a_flag_wins_over_a_recipe_and_a_recipe_over_the_default(
    group: str, name: str, default: Any, tmp_path: Path
) -> None:
    in_recipe, by_flag = examples(name, default)
    lines = dump(assemble({name: in_recipe}, fallback_name="")).splitlines()
    line = next(line for line in lines if line.startswith(f"{name} = "))
    recipe = ["--recipe", recipe_of(tmp_path, f"[{group}]\n{line}\n"), *COMPANIONS.get(name, [])]
    assert value_of(parse(recipe).config, name) == in_recipe != default
    for argv in ([*recipe, *words(name, by_flag)], [*words(name, by_flag), *recipe]):
        assert value_of(parse(argv).config, name) == by_flag != in_recipe


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--apex-amp"], "precision", "fp16"),
        (["--native-amp"], "precision", "fp16"),
        (["--amp"], "precision", "fp16"),
        (["-b", "44"], "batch_size", 44),
        (["-b44"], "batch_size", 44),
        (["-j", "3"], "workers", 3),
        (["--learning-rate", "1e-3"], "lr", 1e-3),
        (["--lr", "1.0e-4"], "lr", 1e-4),
        (["--lr=2"], "lr", 2.0),
        (["--no-mix-token"], "mix_token", False),
        (["--token-label", "images"], "data_dir", "images"),
        (["--scale", ".2", "1"], "scale", (0.2, 1.0)),
        (["--amp", "--precision", "bf16"], "precision", "bf16"),  # of two, the later
        (["--plugin", "a.b,c"], "plugin", "a.b,c"),
        (["--plugin", "a.b", "--plugin", "c"], "plugin", "a.b,c"),
    ],
)
def test_short_spellings(argv: list[str], name: str, value: Any) -> None:
    found = value_of(parse(argv).config, name)
    assert (found, type(found)) == (value, type(value))


def test_a_whole_number_in_a_recipe_will_do_for_a_float(tmp_path: Path) -> None:
    config = parse(["--recipe", recipe_of(tmp_path, "[update]\nlr = 1\n[data]\nscale = [1, 1]")]).config
    assert type(config.update.lr) is float
    assert [type(part) for part in config.data.scale] == [float, float]


def test_a_run_is_called_after_its_recipe_or_its_model(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "[update]\nlr = 1.0\n")
    assert parse(["--recipe", recipe]).config.run.name == "some"
    assert parse(["--recipe", "demo"]).config.run.name == "demo"
    assert parse(["--model", "volo_d4"]).config.run.name == "volo_d4"
    assert parse(["--recipe", recipe, "--name", "mine"]).config.run.name == "mine"


# Without a recipe: what the published code of the network's family has, where ours is another.


@pytest.mark.parametrize(
    ("argv", "batch", "warmup", "dense"),
    [
        ([], 128, 20, 0.5),
        (["--model", "volo_d5"], 128, 20, 0.5),
        (["--model", "resnet50", "--no-mix-token"], 128, 20, 0.5),  # no family
        (["--model", "lvvit_s"], 32, 5, 1.0),
        (["--model", "lvvit_l", "-b", "64"], 64, 5, 1.0),
        (["--dense-weight", "0", "--warmup-epochs", "20", "--model", "lvvit_s"], 32, 20, 0.0),
        (["--recipe", "volo_d1", "--model", "lvvit_s"], 128, 20, 0.5),  # a recipe states all it wants
        (["--recipe", "SOME", "--model", "lvvit_s"], 7, 20, 0.5),
    ],
)
def test_a_familys_default_stands_between_the_schemas_and_a_flag(
    argv: list[str], batch: int, warmup: int, dense: float, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, "[data]\nbatch_size = 7\n")
    config = parse([recipe if word == "SOME" else word for word in argv]).config
    found = (config.data.batch_size, config.update.warmup_epochs, config.objective.dense_weight)
    assert found == (batch, warmup, dense)
