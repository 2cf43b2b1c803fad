"""Rules for imports inside a package, checked in its source.

The check imports nothing. Imports inside functions, under TYPE_CHECKING or under a condition are treated like
all others.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# From bottom to top. A package may import itself and packages of lower layers.
LAYERS = (
    {"core"},
    {"config"},
    {"token_labels"},
    {"cluster", "data", "models", "objective", "optim", "monitor"},
    {"plugins"},
    {"engine"},
    {"dry_run", "evaluation"},
    # Extras: what only some runs or commands need. The layers below find them by name (core/names.py).
    {"demo", "dense", "elastic", "kernels", "labelling", "profiler", "remote"},
    {
        "bench",
        "build_horovod",
        "completion",
        "doctor",
        "evaluate",
        "export",
        "labels",
        "pack",
        "predict",
        "report",
        "train",
    },
    # The Python interface exports as the command does; the package's names are imported on first use.
    {"__main__", "trainer"},
    {"__init__"},
)

# The only package that may import each heavy dependency. None imports torch.distributed: Horovod is used.
ONLY_IMPORTER = {
    "horovod": "cluster",
    "nvidia.dali": "data",
    "pynvml": "cluster",
    "apex": "optim",
    "amp_C": "optim",
    "timm": "models",
    "datasets": "data",
    "obstore": "remote",
    "botocore": "remote",
    "triton": "kernels",
    "onnx": "models",
    "onnxruntime": "models",
    "onnxscript": "models",
    "tensorboard": "monitor",
    "wandb": "monitor",
    "mlflow": "monitor",
    "tensorboardX": "monitor",
    "torch.utils.tensorboard": "monitor",
    "torch.distributed": None,
}
# Modules `peers*.py` of bench may import these, because they measure them.
MEASURED_PEERS = {"horovod", "nvidia.dali", "timm", "torch.distributed"}


def broken_rules(package: Path) -> list[str]:
    """Return one message for each import in a package folder that breaks a rule."""
    return [
        f"{file.relative_to(package).as_posix()}:{line} imports {name}: {rule}"
        for file in sorted(package.rglob("*.py"))
        for line, name in imports(file, package)
        if (rule := _broken_rule(file.relative_to(package), name, package.name))
    ]


def imports(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute dotted name of each import in a file."""
    home = [
        package.name,
        *file.relative_to(package).parent.parts,
    ]  # the package to which a leading dot refers
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = home[: len(home) - node.level + 1] if node.level else []
            source = [*source, *(node.module or "").split(".")] if node.module else source
            # `from a import b` may import the module a.b, so the full name is given.
            yield from ((node.lineno, ".".join([*source, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and _imports_by_name(node.func):
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, name) for name in names if isinstance(name, str))


def _imports_by_name(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def _broken_rule(file: Path, name: str, package: str) -> str:
    """Return the rule that an import breaks, or an empty string."""
    importer = file.parts[0].removesuffix(".py")
    parts = name.split(".")
    if parts[0] == package:
        return _broken_layer(importer, parts[1] if len(parts) > 1 else "")
    if importer == "config" and parts[0] not in sys.stdlib_module_names:
        return "config may import only the standard library, so that --help is fast"
    for dependency, only in ONLY_IMPORTER.items():
        if name == dependency or name.startswith(f"{dependency}."):
            peer = dependency in MEASURED_PEERS and importer == "bench" and file.name.startswith("peers")
            if importer == only or peer:
                return ""
            return f"only {only} may import it" if only else "no package may import it"
    return ""


def _broken_layer(importer: str, imported: str) -> str:
    if importer == imported:
        return ""
    heights = {name: height for height, layer in enumerate(LAYERS) for name in layer}
    unknown = next((name for name in (importer, imported) if name not in heights), None)
    if unknown is not None:
        return f"{unknown or 'the package itself'} is in no layer"
    if heights[importer] == heights[imported]:
        return f"{importer} and {imported} are in the same layer"
    return f"{imported} is above {importer}" if heights[importer] < heights[imported] else ""
