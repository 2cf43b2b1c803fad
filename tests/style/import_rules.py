"""Who may import whom, read from the source of a package: what no reviewer should have to look for.

Nothing is imported to find out, so imports inside functions, under TYPE_CHECKING or behind a condition
count like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# From the ground up. A room imports rooms on floors below its own, and itself.
FLOORS = (
    {"core"},
    {"config", "kernels"},
    {"cluster", "data", "models", "objective", "optim", "monitor"},
    {"plugins"},
    {"engine"},
    {"evaluation", "labelling", "dry_run"},
    {"train", "evaluate", "doctor", "bench", "export", "labels", "pack"},
)

# Each heavy dependency has one door; torch.distributed, whose work Horovod does here, has none.
DOORS = {
    "horovod": "cluster",
    "nvidia.dali": "data",
    "apex": "optim",
    "amp_C": "optim",
    "timm": "models",
    "triton": "kernels",
    "onnx": "models",
    "onnxruntime": "models",
    "onnxscript": "models",
    "tensorboard": "monitor",
    "tensorboardX": "monitor",
    "torch.utils.tensorboard": "monitor",
    "torch.distributed": None,
}
PEERS = "bench/peers*.py"  # what is measured against may come in here
MEASURED_PEERS = {"horovod", "timm", "torch.distributed"}


def broken_rules(package: Path) -> list[str]:
    """Describe every import in a package folder that the house rules forbid."""
    return [
        f"{file.relative_to(package).as_posix()}:{line} imports {name}: {rule}"
        for file in sorted(package.rglob("*.py"))
        for line, name in imports(file, package)
        if (rule := _broken_rule(file.relative_to(package), name, package.name))
    ]


def imports(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of everything that a file imports."""
    home = [package.name, *file.relative_to(package).parent.parts]  # the package that a dot stands for
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = home[: len(home) - node.level + 1] if node.level else []
            source = [*source, *(node.module or "").split(".")] if node.module else source
            # `from a import b` may bring in the module a.b, so the name is told in full.
            yield from ((node.lineno, ".".join([*source, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and _imports_by_name(node.func):
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, name) for name in names if isinstance(name, str))


def _imports_by_name(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def _broken_rule(file: Path, name: str, package: str) -> str:
    """Return the rule that an import breaks, or nothing."""
    room = file.parts[0].removesuffix(".py")
    parts = name.split(".")
    if parts[0] == package:
        return _broken_floor(room, parts[1] if len(parts) > 1 else "")
    if room == "config" and parts[0] not in sys.stdlib_module_names:
        return "config needs the standard library alone, so that --help answers at once"
    for dependency, door in DOORS.items():
        if name == dependency or name.startswith(f"{dependency}."):
            peer = dependency in MEASURED_PEERS and file.match(PEERS)
            return "" if room == door or peer else f"its one door is {door or 'shut'}"
    return ""


def _broken_floor(room: str, imported: str) -> str:
    if room == imported:
        return ""
    floors = {name: height for height, floor in enumerate(FLOORS) for name in floor}
    unknown = next((name for name in (room, imported) if name not in floors), None)
    if unknown is not None:
        return f"{unknown or 'the package itself'} is no room of the house"
    if floors[room] == floors[imported]:
        return f"{room} and {imported} are on one floor"
    return f"{imported} is above {room}" if floors[room] < floors[imported] else ""
