"""Find the settings that a package reads, as `GROUP.FIELD` or, if a group is passed, `settings.FIELD`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path


def unread_settings(package: Path, fields: Iterable[tuple[str, str]]) -> list[str]:
    """Return the (group, field) pairs, as "group.field", that no module but the schema reads."""
    found: set[tuple[str, str]] = set()
    for file in package.rglob("*.py"):
        if file.relative_to(package) != Path("config/schema.py"):
            found |= _attributes(ast.parse(file.read_text(encoding="utf-8")))
    return [
        f"{group}.{field}"
        for group, field in fields
        if (group, field) not in found and ("settings", field) not in found
    ]


def _attributes(tree: ast.Module) -> set[tuple[str, str]]:
    """Return (owner, name) of each attribute that is read; the owner is the last name without leading `_`."""
    return {
        (_last_name(node.value).lstrip("_"), node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
