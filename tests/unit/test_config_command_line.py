"""The command line is the schema: its help, its spellings, and default < recipe < flag."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from schema_examples import (
    COMPANIONS,
    EXAMPLES,
    FIELDS,
    FURTHER_FLAGS,
    GROUPS,
    NAMES,
    examples,
    recipe_of,
    value_of,
    words,
)

from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import Config
from horovod_volo.config.values import all_settings, assemble


def test_the_settings_are_the_schemas_fields() -> None:
    assert [setting.name for setting in all_settings()] == NAMES
    assert set(EXAMPLES) | set(COMPANIONS) | set(FURTHER_FLAGS) <= set(NAMES)


@pytest.fixture
def help_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "300")  # no help line is broken
    with pytest.raises(SystemExit) as ended:
        parse(["--help-all"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def entries(text: str) -> dict[str, str]:
    """Read the help's entries: how each is called, and what is said of it."""
    found: dict[str, str] = {}
    for called, beside, below in re.findall(
        r"^  (?=\S)(\S.*?)(?:  +(\S.*))?\n(?:    {4,}(\S.*))?", text, flags=re.MULTILINE
    ):
        assert called not in found
        found[called] = beside or below
    return found


def flags_in(called: str) -> list[str]:
    return re.findall(r"(?:^|(?<= ))--?[a-z][a-z-]*", called)


def typed(shown: str, default: Any) -> Any:
    """Read a default as it is shown, in the type of the schema's."""
    if isinstance(default, bool):
        return {"on": True, "off": False}[shown]
    if isinstance(default, tuple):
        return tuple(map(float, shown.split())) if shown != "empty" else ()
    return "" if shown == "empty" else type(default)(shown)


def test_the_help_names_each_flag_once(help_text: str) -> None:
    expected = ["-h", "--help", "--help-all", "--recipe", "--dry-run", "--ranks"]
    for name in NAMES:
        if name != "data_dir":
            expected += ["--" + name.replace("_", "-"), *FURTHER_FLAGS.get(name, [])]
    expected += ["--no-" + name.replace("_", "-") for _, name, default in FIELDS if isinstance(default, bool)]
    shown = [flag for called in entries(help_text) for flag in flags_in(called)]
    assert sorted(shown) == sorted(expected)
    assert "DATA_DIR" in entries(help_text)


def test_the_help_shows_the_schemas_defaults(help_text: str) -> None:
    by_flag = {flag: reported for called, reported in entries(help_text).items() for flag in flags_in(called)}
    for _, name, default in FIELDS:
        if name == "data_dir":
            continue
        match = re.search(r"\(default: (.*)\)$", by_flag["--" + name.replace("_", "-")])
        assert match is not None, name
        shown = typed(match[1], default)
        assert shown == (pytest.approx(default, rel=1e-5) if isinstance(default, tuple) else default), name


def test_the_help_shows_every_group_with_its_flags(help_text: str) -> None:
    sections = re.split(r"^(\S.*):$", help_text, flags=re.MULTILINE)[1:]
    titles = [title for title in sections[::2] if title != "options"]
    assert titles == [type(getattr(Config(), group)).__doc__ for group in GROUPS]
    for group, section in zip(GROUPS, sections[3::2], strict=True):
        own = [name for home, name, _ in FIELDS if home == group and name != "data_dir"]
        shown = [flag for called in entries(section) for flag in flags_in(called)]
        assert {"--" + name.replace("_", "-") for name in own} <= set(shown)


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
    ],
)
def test_short_spellings(argv: list[str], name: str, value: Any) -> None:
    found = value_of(parse(argv).config, name)
    assert (found, type(found)) == (value, type(value))


def test_plugins_are_named_by_one_flag_or_several() -> None:
    once, twice = ["--plugin", "a.b,c"], ["--plugin", "a.b", "--plugin", "c"]
    assert parse(once).config.run.plugin == parse(twice).config.run.plugin == "a.b,c"


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


def test_the_help_tells_a_familys_default(help_text: str) -> None:
    reported = {flag: line for called, line in entries(help_text).items() for flag in flags_in(called)}
    assert reported["--warmup-epochs"].endswith("; lvvit_* without a recipe: 5 (default: 20)")
    assert "lvvit_" not in reported["--epochs"]


def test_what_runs_without_a_recipe_is_repeated_by_its_resolved_settings(tmp_path: Path) -> None:
    first = parse(["--model", "lvvit_s", "--name", "a"]).config
    assert parse(["--recipe", recipe_of(tmp_path, dump(first))]).config == first
