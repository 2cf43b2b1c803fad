"""Every setting is read and has a use, and none of our flags is an ambiguous prefix of one of horovodrun."""

import ast
import re
import tomllib

import pytest
from horovod.runner import launch

from horovod_volo import evaluate, labels
from horovod_volo.config.command_line import build_parser
from horovod_volo.config.recipe import RECIPES
from horovod_volo.config.schema import all_settings
from horovod_volo.config.setting import Setting
from tests.documents import DOCUMENTS, ROOT, text_of

SETTINGS = all_settings()


def read_attributes() -> set[tuple[str, str]]:
    """Return the attributes that modules other than the schema read, each with the name of its owner."""
    read: set[tuple[str, str]] = set()
    for file in sorted((ROOT / "horovod_volo").rglob("*.py")):
        if file.match("config/schema.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                read.add((name.lstrip("_"), node.attr))
    return read


def test_every_setting_is_read() -> None:
    """As GROUP.FIELD or, where a group is passed, as `settings.FIELD`."""
    read = read_attributes()
    ways = {item.name: {(item.group, item.name), ("settings", item.name)} for item in SETTINGS}
    assert [name for name, either in ways.items() if not either & read] == []


def is_mentioned(setting: Setting, text: str) -> bool:
    """Return whether a text contains a flag of the setting; a positional one follows the entry point."""
    if setting.positional:
        return re.search(r"horovod_volo\.train (?!-)\S", text) is not None
    spellings = [*setting.flags, *(flag.partition("=")[0] for flag in setting.also)]
    if setting.kind is bool:
        spellings.append("--no-" + setting.name.replace("_", "-"))
    return any(re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) for flag in spellings)


def test_every_flag_has_a_use() -> None:
    """A flag that fails here must be set by a recipe, be mentioned in the documents, or be removed."""
    text = "\n".join(map(text_of, DOCUMENTS))
    recipes = [tomllib.loads(path.read_text(encoding="utf-8")) for path in RECIPES.glob("*.toml")]
    used = {name for recipe in recipes for table in recipe.values() for name in table}
    assert [item.flag for item in SETTINGS if not (item.name in used or is_mentioned(item, text))] == []


PARSERS = {"train": build_parser(), "evaluate": evaluate.build_parser(), "labels": labels.build_parser()}


def flags_of(parser) -> list[str]:
    flags = []
    for action in parser._actions:
        flags += action.option_strings
        for inner in (action.choices or {}).values() if hasattr(action, "add_parser") else ():
            flags += flags_of(inner)
    return flags


def is_accepted(flag: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "2", "python", "-m", "entry", flag, "value"])
    try:
        return launch.parse_args().command == ["python", "-m", "entry", flag, "value"]
    except SystemExit:
        return False


@pytest.mark.parametrize("entry", PARSERS)
def test_horovodrun_accepts_commands_with_our_flags(entry, monkeypatch, capsys):
    flags = flags_of(PARSERS[entry])
    assert len(flags) > 5
    assert [flag for flag in flags if not is_accepted(flag, monkeypatch)] == []
    assert not is_accepted("--timeline", monkeypatch)
