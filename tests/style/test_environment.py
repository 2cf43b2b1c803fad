"""setup.cfg, tools/constraints.txt and environment.yml list the same packages, and the versions agree.

Only Horovod is in none of them: horovod_volo/cluster/build_horovod.sh builds the version that it names.
"""

import configparser
import re
from typing import Any

import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement

from tests.documents import ROOT, text_of

DEVELOPMENT = "dev"  # the extra with all that tests and lint need
# Not pinned: PyTorch for CUDA requires one version of it.
NOT_PINNED = {"triton"}
CONDA: list[Any] = yaml.safe_load(text_of("environment.yml"))["dependencies"]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


CORE = list(map(Requirement, lines_of(SETUP["options"]["install_requires"])))
EXTRAS = {
    name: list(map(Requirement, lines_of(text))) for name, text in SETUP["options.extras_require"].items()
}


def with_extras(*names: str) -> dict[str, Requirement]:
    """Return the requirements of the package with extras, and with the extras that these name, by name."""
    found = {each.name: each for each in CORE}
    for name in names:
        for each in EXTRAS[name]:
            found |= with_extras(*each.extras) if each.name == "horovod_volo" else {each.name: each}
    return found


def test_the_constraints_are_in_the_ranges_of_setup_cfg() -> None:
    allowed = with_extras(*EXTRAS)
    pins = dict(line.split("==") for line in lines_of(text_of("tools/constraints.txt")))
    assert "horovod" not in allowed  # pip would build it without PyTorch
    assert set(with_extras(DEVELOPMENT, "horovod")) - NOT_PINNED <= set(pins) <= set(allowed)
    assert [name for name, pin in pins.items() if not allowed[name].specifier.contains(pin)] == []


def test_conda_installs_the_requirements_of_setup_cfg_in_the_tested_versions() -> None:
    ((first, *requirements),) = [entry["pip"] for entry in CONDA if isinstance(entry, dict)]
    assert first == "--constraint tools/constraints.txt"
    assert sorted(requirements) == sorted(with_extras(DEVELOPMENT, "dali-cuda13"))
    (python,) = [entry for entry in CONDA if str(entry).startswith("python=")]
    minors = [int(re.findall(r"3\.(\d+)", text)[0]) for text in (SETUP["options"]["python_requires"], python)]
    assert minors[0] <= minors[1]


def test_the_ranges_leave_a_cluster_its_own_versions() -> None:
    """Only lower bounds, but for timm, whose modules we use, and PyTorch, which Horovod is compiled for."""
    operators = {each.name: {part.operator for part in each.specifier} for each in CORE}
    assert {name for name, found in operators.items() if {"<", "<=", "==", "~="} & found} == {"timm", "torch"}
    assert all(">=" in found for found in operators.values())


def test_the_workflow_runs_every_folder_of_tests_once() -> None:
    (job,) = yaml.safe_load(text_of(".github/workflows/checks.yml"))["jobs"].values()
    commands = " ".join(entry["run"] for entry in job["strategy"]["matrix"]["include"])
    folders = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")} - {"experiments"}
    assert sorted(re.findall(r"tests/(\w+)(?!\S)", commands)) == sorted(folders)
    assert all((ROOT / name).exists() for name in re.findall(r"\./(tools/\w+)", commands))


def test_the_newest_torch_that_was_tried_is_the_newest_that_is_allowed() -> None:
    """The build of Horovod warns of newer ones, and docs/install.md lists what was tried."""
    (newest,) = re.findall(r"newest_tried=2\.(\d+)", text_of("horovod_volo/cluster/build_horovod.sh"))
    (allowed,) = [each.specifier for each in CORE if each.name == "torch"]
    assert allowed.contains(f"2.{newest}.9")
    assert not allowed.contains(f"2.{int(newest) + 1}.0")
    tried = re.findall(r"^\| 2\.(\d+)\.\d+ \|", text_of("docs/install.md"), re.MULTILINE)
    assert max(map(int, tried)) == int(newest)
