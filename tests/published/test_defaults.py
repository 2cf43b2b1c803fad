"""What a flag that is left out means without a recipe: as in the published main.py, or a stated deviation.

Both main.py are read, not run: their `add_argument` calls tell flags and defaults.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from horovod_volo.config.command_line import build_parser, parse
from horovod_volo.config.values import all_settings
from tests.published.checkouts import named_folder

FOLDER = named_folder()
DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"
FAMILIES = {"volo_d1": "volo", "volo_d5": "volo", "lvvit_s": "TokenLabeling", "lvvit_l": "TokenLabeling"}
# What None stands for in the published code, as we write it.
NONE_IS: dict[str, Any] = {
    "--clip-grad": 0.0,  # no clipping
    "--crop-pct": 0.0,  # the network's own
    "--drop-path": 0.0,
    "--img-size": 224,  # what the networks are built for
}
# Theirs, ours, and the reason; docs/training.md says the same to users.
DEVIATIONS: dict[str, tuple[Any, Any, str]] = {
    "--lr": (1.6e-3, 0.0, "the same at 1,024 images, but it follows the batch"),
    "--token-label-size": (1, 0, "follows from the image size, as the published commands give it"),
    "--num-classes": (None, 0, "as many as there are folders, not the 1000 of the network"),
    "--workers": (8, 0, "the share of the host's cores that a rank has"),
    "--output": ("", "runs", "theirs names ./output where it is empty"),
}


def published_flags(file: Path) -> dict[str, Any]:
    """Return the default of every flag by its spellings; of a switch, False."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr != "add_argument":
                continue
            given = {word.arg: word.value for word in node.keywords}
            default = False if "action" in given else None
            if "default" in given:
                default = eval(
                    compile(ast.Expression(given["default"]), str(file), "eval"), {"__builtins__": {}}
                )
            for name in node.args:
                assert isinstance(name, ast.Constant)
                found[name.value] = default
    return found


def our_value(model: str, flag: str) -> Any:
    """Return what a user of a network has who does not give a flag; of a shorthand, whether it is so."""
    config = parse(["--model", model]).config
    for setting in all_settings():
        value = getattr(getattr(config, setting.group), setting.name)
        if flag in setting.flags:
            return list(value) if isinstance(value, tuple) else value
        if flag in setting.shorthands:
            return value == setting.shorthands[flag]
    raise AssertionError(f"{flag} is no flag of a setting")


def shared_flags(theirs: dict[str, Any]) -> list[str]:
    ours = {flag for action in build_parser()._actions for flag in action.option_strings}
    return sorted(flag for flag in theirs.keys() & ours if flag.startswith("--"))


@pytest.mark.parametrize("model", FAMILIES)
def test_a_flag_that_is_left_out_is_as_published_or_a_stated_deviation(model: str) -> None:
    theirs = published_flags(FOLDER / FAMILIES[model] / "main.py")
    shared = shared_flags(theirs)
    assert len(shared) > 40
    different = {}
    for flag in shared:
        published, ours = theirs[flag], our_value(model, flag)
        if published is None and flag in NONE_IS:
            published = NONE_IS[flag]
        if flag != "--model" and ours != published:
            different[flag] = (published, ours)
    assert different == {flag: values[:2] for flag, values in DEVIATIONS.items()}


def test_the_network_that_is_trained_where_none_is_named() -> None:
    """TokenLabeling's is a plain transformer that is none of its published ones, and not offered here."""
    theirs = {
        name: published_flags(FOLDER / name / "main.py")["--model"] for name in ("volo", "TokenLabeling")
    }
    assert theirs == {"volo": parse([]).config.model.model, "TokenLabeling": "lvvit"}


def test_users_are_told_of_each_deviation() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    for flag in DEVIATIONS:
        assert any(row.startswith(f"| `{flag}` |") for row in rows), flag
