"""Packages import only lower layers, one package imports each heavy dependency, small modules are merged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from import_rules import broken_rules, imports

PACKAGE = Path(__file__).parents[2] / "horovod_volo"
# Modules under sixty lines that have one importer and are nevertheless not merged into it, each with its
# reason. A member of a registered family of modules is listed here too.
SMALL_MODULES_WITH_ONE_IMPORTER = {
    # What a scaler has skipped follows from optimization, its importer belongs to `engine`.
    "optim.loss_scale",
}


def test_no_import_of_the_package_breaks_a_rule() -> None:
    assert broken_rules(PACKAGE) == []


def write_package(folder: Path, files: dict[str, str]) -> Path:
    """Write a package called `example` and return its folder."""
    package = folder / "example"
    for name, source in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("file", "source", "rule"),
    [
        ("config/schema.py", "from example.engine import loop", "engine is above config"),
        ("config/schema.py", "import numpy", "only the standard library"),
        ("data/loader.py", "import example.engine.loop as x", "engine is above data"),
        ("data/loader.py", "from .. import engine", "engine is above data"),
        ("data/far/away.py", "from ...engine import loop", "engine is above data"),
        ("data/__init__.py", "from ..engine import loop", "engine is above data"),
        ("data/loader.py", "from ..cluster import world", "data and cluster are in the same layer"),
        ("train.py", "import example.bench.results", "train and bench are in the same layer"),
        ("engine/loop.py", "import example", "the package itself is in no layer"),
        ("unlisted/module.py", "from example.config import schema", "unlisted is in no layer"),
        ("engine/loop.py", "import horovod.torch as hvd", "only cluster may import it"),
        ("engine/loop.py", "from nvidia import dali", "only data may import it"),
        ("engine/loop.py", "from torch.utils.tensorboard import SummaryWriter", "only monitor may import it"),
        ("cluster/collectives.py", "import torch.distributed as dist", "no package may import it"),
        ("bench/step.py", "import timm", "only models may import it"),
        ("bench/peers.py", "import onnx", "only models may import it"),
        ("models/build.py", "if TYPE_CHECKING:\n    import example.engine.loop", "engine is above models"),
        ("models/build.py", "def late():\n    import example.data", "models and data are in the same layer"),
        ("optim/muon.py", "import importlib\nimportlib.import_module('timm.layers')", "only models may"),
        ("optim/muon.py", "__import__('horovod')", "only cluster may"),
    ],
)
def test_a_broken_rule_is_found(file: str, source: str, rule: str, tmp_path: Path) -> None:
    found = broken_rules(write_package(tmp_path, {file: source}))
    assert any(message.startswith(f"{file}:") and rule in message for message in found), found


def test_allowed_imports_pass(tmp_path: Path) -> None:
    files = {
        "config/schema.py": "import argparse\nfrom .values import shown\nfrom example.config import values",
        "cluster/collectives.py": "import horovod.torch as hvd\nimport torch\nfrom ..config import errors",
        "data/loader.py": "from nvidia.dali import fn\nfrom . import sampler\nfrom .sampler import Sampler",
        "models/build.py": "from timm.models.volo import VOLO",
        "monitor/run_logger.py": "from torch.utils.tensorboard import SummaryWriter",
        "engine/loop.py": "from example.cluster import world\nfrom ..data.loader import Batch\nimport timms",
        "bench/loss.py": "from example.engine import loop\nfrom example.bench import comparison",
        "bench/peers_reduce.py": "import horovod.torch\nimport torch.distributed",
        "train.py": "from .engine.loop import fit\nimport example.config.schema",
    }
    assert broken_rules(write_package(tmp_path, files)) == []


def small_modules_with_one_importer(package: Path, lines: int) -> dict[str, str]:
    """Return modules with fewer lines that one other module imports, each with that module, as dotted names.

    Left out are modules that import a third-party package which no other module of their room imports.
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


def test_small_modules_with_one_importer_are_merged_into_it() -> None:
    """If a module is missing on the left, remove it from the exceptions: it has grown, or was merged."""
    assert small_modules_with_one_importer(PACKAGE, 60).keys() == SMALL_MODULES_WITH_ONE_IMPORTER


def test_a_small_module_with_one_importer_is_found(tmp_path: Path) -> None:
    files = {
        "data/loader.py": "from example.data import reader, decoder, names\nfrom .size import LENGTH",
        "data/reader.py": "import numpy",
        "data/decoder.py": "import nvidia.dali",
        "data/names.py": "NAME = 1\n" * 60,
        "data/size.py": "import numpy\nLENGTH = 1",
        "engine/loop.py": "from example.data.reader import read\nfrom example.data import loader",
    }
    found = small_modules_with_one_importer(write_package(tmp_path, files), 60)
    assert found == {"data.loader": "engine.loop", "data.size": "data.loader"}
