"""Every setting is read by the code, and set by a recipe or mentioned in the documentation."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from horovod_volo.config.recipe import RECIPES
from horovod_volo.config.schema import all_settings
from horovod_volo.config.setting import Setting

ROOT = Path(__file__).parents[2]
SETTINGS = all_settings()


def unread_settings(package: Path, fields: list[tuple[str, str]]) -> list[str]:
    """Return "group.field" of each (group, field) that no module but the schema reads.

    It is read as GROUP.FIELD or, where a group is passed, as `settings.FIELD`.
    """
    read: set[tuple[str, str]] = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = (
                    node.value.attr
                    if isinstance(node.value, ast.Attribute)
                    else getattr(node.value, "id", "")
                )
                if file.relative_to(package) != Path("config/schema.py"):
                    read.add((owner.lstrip("_"), node.attr))
    return [f"{group}.{name}" for group, name in fields if not {(group, name), ("settings", name)} & read]


def test_every_setting_is_read() -> None:
    fields = [(setting.group, setting.name) for setting in SETTINGS]
    assert unread_settings(ROOT / "horovod_volo", fields) == []


def test_an_unread_setting_is_found(tmp_path: Path) -> None:
    schema, loop = tmp_path / "config" / "schema.py", tmp_path / "engine" / "loop.py"
    for path, source in (
        (schema, "update.declared_only"),
        (loop, "job.config.update.lr\nself._settings.scale\nupdate.written = 1\nother.elsewhere"),
    ):
        path.parent.mkdir()
        path.write_text(source)
    fields = [("update", name) for name in ("lr", "scale", "declared_only", "written", "elsewhere")]
    unread = unread_settings(tmp_path, fields)
    assert unread == ["update.declared_only", "update.written", "update.elsewhere"]


def documents() -> str:
    """Return the text of README.md and docs/."""
    files = [*ROOT.glob("README.md"), *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def is_mentioned(setting: Setting, text: str) -> bool:
    """Return whether a text contains a flag of the setting; a positional one follows the entry point."""
    if setting.positional:
        return re.search(r"horovod_volo\.train (?!-)\S", text) is not None
    spellings = [*setting.flags, *setting.shorthands]
    if setting.kind is bool:
        spellings.append("--no-" + setting.name.replace("_", "-"))
    return any(re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) for flag in spellings)


def is_in_a_recipe(setting: Setting) -> bool:
    """Return whether a recipe of the package sets it."""
    recipes = [tomllib.loads(path.read_text(encoding="utf-8")) for path in RECIPES.glob("*.toml")]
    return any(setting.name in recipe.get(setting.group, {}) for recipe in recipes)


def test_every_flag_has_a_use() -> None:
    """A flag that fails here must be set by a recipe, be mentioned in the documents, or be removed."""
    text = documents()
    unused = [item.flags[0] for item in SETTINGS if not (is_in_a_recipe(item) or is_mentioned(item, text))]
    assert unused == []


def test_a_mention_is_a_complete_flag() -> None:
    lr = next(setting for setting in SETTINGS if setting.name == "lr")
    mix_token = next(setting for setting in SETTINGS if setting.name == "mix_token")
    assert is_mentioned(lr, "horovodrun ... --lr 1e-4")
    assert is_mentioned(lr, "`--learning-rate`")
    assert not is_mentioned(lr, "--lr-base 1.6e-3, --warmup-lr 1e-6")
    assert is_mentioned(mix_token, "--no-mix-token")
