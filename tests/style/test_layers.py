"""Packages import only lower layers, one package imports each heavy dependency, small modules are merged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from import_rules import broken_rules
from small_modules import small_modules_with_one_importer

PACKAGE = Path(__file__).parents[2] / "horovod_volo"
# Modules under sixty lines that have one importer and are nevertheless not merged into it, each with its
# reason. A member of a registered family of modules is listed here too.
SMALL_MODULES_WITH_ONE_IMPORTER = {
    # Triton is imported only where a kernel is launched.
    # Losses between log points belong to `monitor`, their importer to `engine`.
    "monitor.meters",
    # What a scaler has skipped follows from optimization, its importer belongs to `engine`.
    "optim.loss_scale",
    # The network computes what `tasks` draws.
    "models.outlook_attention",
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
        ("data/loader.py", "from example import engine", "engine is above data"),
        ("data/loader.py", "from ..engine.loop import fit", "engine is above data"),
        ("data/loader.py", "from .. import engine", "engine is above data"),
        ("data/far/away.py", "from ...engine import loop", "engine is above data"),
        ("data/__init__.py", "from ..engine import loop", "engine is above data"),
        ("data/loader.py", "from ..cluster import world", "data and cluster are in the same layer"),
        ("train.py", "import example.bench.results", "train and bench are in the same layer"),
        ("engine/loop.py", "from .. import train", "train is above engine"),
        ("engine/loop.py", "import example", "the package itself is in no layer"),
        ("unlisted/module.py", "from example.config import schema", "unlisted is in no layer"),
        ("engine/loop.py", "import horovod.torch as hvd", "only cluster may import it"),
        ("engine/loop.py", "from nvidia import dali", "only data may import it"),
        ("engine/loop.py", "from nvidia.dali import fn", "only data may import it"),
        ("engine/state.py", "from apex.optimizers import FusedLAMB", "only optim may import it"),
        ("engine/loop.py", "from torch.utils.tensorboard import SummaryWriter", "only monitor may import it"),
        ("cluster/collectives.py", "import torch.distributed as dist", "no package may import it"),
        ("bench/step.py", "import timm", "only models may import it"),
        ("bench/peers_timm.py", "import onnx", "only models may import it"),
        (
            "models/build.py",
            "if TYPE_CHECKING:\n    from example.engine import loop",
            "engine is above models",
        ),
        (
            "models/build.py",
            "def late():\n    import example.data.loader",
            "models and data are in the same layer",
        ),
        ("optim/adamw.py", "import importlib\nimportlib.import_module('timm.layers')", "only models may"),
        ("optim/adamw.py", "__import__('horovod')", "only cluster may"),
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


def test_a_broken_rule_in_the_real_package_is_found(tmp_path: Path) -> None:
    copy = shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    broken = copy / "objective" / "roi_weights.py"
    broken.write_text(f"{broken.read_text(encoding='utf-8')}\nimport horovod_volo.engine.loop as above\n")
    assert len(broken_rules(copy)) == 1
    assert "engine is above objective" in broken_rules(copy)[0]


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
