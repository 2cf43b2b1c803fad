"""Recipes: what is written is read again to the bit, and those of the package hold together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from schema_examples import FIELDS, examples, recipe_of

from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import RECIPES, dump, load_recipe, recipe_names
from horovod_volo.config.rules import check, notes
from horovod_volo.config.values import assemble

ODD = [
    "plain",
    " leading and trailing ",
    "quotes \" and ' and \"\"\" and '''",
    "back\\slash, \\n, \\u0041 and a last \\",
    "lines\nof\r\ntext\tand tabs",
    "# [table] = 1",
    "Größe 図 🦊 \u2028 \u0085",
    "\x00\x01\x1b\x1f\x7f\x80",
]


@pytest.mark.parametrize("text", ODD)
def test_every_setting_survives_being_written_and_read(text: str, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {}
    for _, name, default in FIELDS:
        other = examples(name, default)[0]
        chosen[name] = text if other == "one" else other
    written = assemble(chosen, fallback_name="")
    recipe = recipe_of(tmp_path, dump(written))
    assert load_recipe(recipe) == chosen
    read = assemble(load_recipe(recipe), fallback_name="")
    assert read == written
    assert dump(read) == dump(written)


@pytest.mark.parametrize("number", [0.1 + 0.2, 5e-324, 1e-5, 1e16, 1e22, 1.7976931348623157e308, 3.0])
def test_numbers_survive_to_the_bit(number: float, tmp_path: Path) -> None:
    written = assemble({"lr": number, "ratio": (number, number)}, fallback_name="")
    read = assemble(load_recipe(recipe_of(tmp_path, dump(written))), fallback_name="")
    assert read == written


def test_resolved_settings_are_a_recipe_that_repeats_the_run(tmp_path: Path) -> None:
    first = parse(["images", "--recipe", "demo", "--epochs", "7", "--name", "a b", "--scale", "0.1", "0.9"])
    assert parse(["--recipe", recipe_of(tmp_path, dump(first.config))]).config == first.config


@pytest.mark.parametrize("name", recipe_names())
def test_the_packages_recipes_load_and_agree_with_themselves(name: str) -> None:
    config = parse(["--recipe", name]).config
    check(config)
    assert notes(config) == []
    assert load_recipe(name) == load_recipe(str(RECIPES / f"{name}.toml")) != {}
