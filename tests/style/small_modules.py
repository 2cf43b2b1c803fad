"""Find small modules that only one other module imports: they should be part of it."""

from __future__ import annotations

import sys
from pathlib import Path

from import_rules import imports


def small_modules_with_one_importer(package: Path, lines: int) -> dict[str, str]:
    """Return modules with fewer lines than given that one other module imports, each with that module.

    Left out are modules that import a third-party package which no other module of their top-level package
    imports. Modules are dotted names without the package's own name.
    """
    files = {
        ".".join(file.relative_to(package).with_suffix("").parts): file
        for file in sorted(package.rglob("*.py"))
        if file.name != "__init__.py"
    }
    imported = {name: [dotted for _, dotted in imports(file, package)] for name, file in files.items()}
    third_party = {name: _third_party(dotted, package.name) for name, dotted in imported.items()}
    found = {}
    for name, file in files.items():
        full_name = f"{package.name}.{name}"
        importers = [
            other
            for other, dotted in imported.items()
            if other != name and any(f"{each}.".startswith(f"{full_name}.") for each in dotted)
        ]
        if len(importers) != 1 or len(file.read_text(encoding="utf-8").splitlines()) >= lines:
            continue
        top_level = name.partition(".")[0]
        others = [
            third_party[other] for other in files if other != name and other.startswith(f"{top_level}.")
        ]
        if third_party[name] <= set().union(*others):
            found[name] = importers[0]
    return found


def _third_party(dotted_names: list[str], package: str) -> set[str]:
    return {name.partition(".")[0] for name in dotted_names} - sys.stdlib_module_names - {package}
