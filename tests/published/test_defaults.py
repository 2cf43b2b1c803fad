"""Defaults of flags without a recipe are the published main.py's, except for listed deviations."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.schema import all_settings
from tests.published.checkouts import named_folder

FOLDER = named_folder()
DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"
FAMILIES = {"volo_d1": "volo", "volo_d5": "volo", "lvvit_s": "TokenLabeling", "lvvit_l": "TokenLabeling"}
# Our values for what None, and of --sync-bn False, means in the published code.
NONE_IS: dict[str, Any] = {
    "--mean": [],  # that of the weights
    "--std": [],
    "--sync-bn": "none",
    "--clip-grad": 0.0,  # no clipping
    "--crop-pct": 0.0,  # that of the network
    "--drop-path": 0.0,
    "--opt-betas": [],  # those of the optimizer
    "--opt-eps": 0.0,
    "--img-size": 224,  # the size for which the networks are built
}
# The published default, ours, and the reason; docs/training.md lists them for users.
DEVIATIONS: dict[str, tuple[Any, Any, str]] = {
    "--lr": (1.6e-3, 0.0, "the same at 1,024 images, but scaled with the batch"),
    "--decay-epochs": (30, 0.0, "of --sched step: the milestones are at 66 and 83 % of the epochs"),
    "--token-label-size": (1, 0, "computed from the image size; the published commands give the same"),
    "--num-classes": (None, 0, "the number of class folders instead of the network's 1000"),
    "--workers": (8, 0, "the number of cores of the rank"),
    "--val-split": ("validation", "", "the folder is found by its usual names"),
    "--output": ("", "runs", "without a name the published code writes to ./output"),
}

# Their switches that set a value of ours, with it.
_ALSO = [each for setting in all_settings() for each in setting.also if "=" in each and "{}" not in each]
SWITCHES = dict(each.split("=") for each in _ALSO)


def published_flags(file: Path) -> dict[str, Any]:
    """Return the default of each flag by its spelling; that of a switch is False."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr != "add_argument":
                continue
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            default = False if "action" in keywords else None
            if "default" in keywords:
                default = eval(
                    compile(ast.Expression(keywords["default"]), str(file), "eval"), {"__builtins__": {}}
                )
            for name in node.args:
                assert isinstance(name, ast.Constant)
                found[name.value] = default
    return found


def our_value(model: str, flag: str) -> Any:
    """Return our default of a flag for a network; for a switch, whether its value is the default."""
    config = parse(["--model", model]).config
    for setting in all_settings():
        value = getattr(getattr(config, setting.group), setting.name)
        if flag in setting.flags:
            return list(value) if isinstance(value, tuple) else value
        if text := SWITCHES.get(flag) if flag in " ".join(setting.also) else None:
            return value == setting.from_text(text)
    raise AssertionError(f"{flag} is not a flag of a setting")


@pytest.mark.parametrize("model", FAMILIES)
def test_defaults_are_the_published_ones_or_listed_deviations(model: str) -> None:
    theirs = published_flags(FOLDER / FAMILIES[model] / "main.py")
    named = {flag for setting in all_settings() for flag in setting.flags} | SWITCHES.keys()
    common = sorted(flag for flag in theirs.keys() & named if flag.startswith("--"))
    assert len(common) > 40
    different = {}
    for flag in common:
        published, ours = theirs[flag], our_value(model, flag)
        if published in (None, False) and flag in NONE_IS:
            published = NONE_IS[flag]
        if flag != "--model" and ours != published:
            different[flag] = (published, ours)
    assert different == {flag: values[:2] for flag, values in DEVIATIONS.items()}


def test_the_default_network() -> None:
    """TokenLabeling's is a plain transformer that was not published and does not exist here."""
    theirs = {
        name: published_flags(FOLDER / name / "main.py")["--model"] for name in ("volo", "TokenLabeling")
    }
    assert theirs == {"volo": parse([]).config.model.model, "TokenLabeling": "lvvit"}


def test_the_documentation_lists_each_deviation() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    for flag in DEVIATIONS:
        assert any(row.startswith(f"| `{flag}` |") for row in rows), flag


@pytest.mark.parametrize("repository", ["volo", "TokenLabeling"])
def test_the_migration_guide_lists_every_flag(repository: str) -> None:
    text = DOCUMENT.with_name("migration.md").read_text(encoding="utf-8")
    text = text.partition("## From sail-sg/volo")[2].partition("## From timm")[0]
    firsts = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    listed = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", firsts))
    long = [flag for flag in published_flags(FOLDER / repository / "main.py") if flag.startswith("--")]
    assert len(long) > 90
    others = {"--config"}  # the same as -c
    assert set(long) - listed == others
