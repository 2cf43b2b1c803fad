"""setup.cfg, tools/constraints.txt and environment.yml list the same packages, and the versions agree.

Only Horovod is in none of them: horovod_volo/cluster/build_horovod.sh builds the version that it names.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CONSTRAINTS = "--constraint tools/constraints.txt"
DEVELOPMENT = "dev"  # the extra with all that tests and lint need
# Not pinned: PyTorch for CUDA requires one version of it.
NOT_PINNED = {"triton"}


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def setup_cfg() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def extras() -> dict[str, list[Requirement]]:
    section = setup_cfg()["options.extras_require"]
    return {name: list(map(Requirement, lines_of(text))) for name, text in section.items()}


def core() -> list[Requirement]:
    return list(map(Requirement, lines_of(setup_cfg()["options"]["install_requires"])))


def with_extras(*names: str) -> dict[str, Requirement]:
    """Return the requirements of the package with extras, and with the extras that these name, by name."""
    found: dict[str, Requirement] = {each.name: each for each in core()} if not names else with_extras()
    for name in names:
        for each in extras()[name]:
            if each.name == "horovod_volo":
                found |= with_extras(*sorted(each.extras))
            else:
                found[each.name] = each
    return found


def constraints() -> dict[str, str]:
    lines = lines_of((ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8"))
    pins = [re.fullmatch(r"([\w-]+)==([\w.]+)", line) for line in lines]
    assert None not in pins, lines
    return {match[1]: match[2] for match in pins if match}


def conda_environment() -> dict[str, Any]:
    environment: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    return environment


def pip_requirements() -> list[str]:
    groups = [entry["pip"] for entry in conda_environment()["dependencies"] if isinstance(entry, dict)]
    assert len(groups) == 1
    return list(groups[0])


def test_the_constraints_are_in_the_ranges_of_setup_cfg() -> None:
    allowed = with_extras(*extras())
    pins = constraints()
    assert "horovod" not in allowed  # pip would build it without PyTorch
    assert set(with_extras(DEVELOPMENT, "horovod")) - NOT_PINNED <= set(pins) <= set(allowed)
    assert [name for name, pin in pins.items() if not allowed[name].specifier.contains(pin)] == []


def test_conda_installs_the_requirements_of_setup_cfg_in_the_tested_versions() -> None:
    first, *requirements = pip_requirements()
    assert first == CONSTRAINTS
    expected = with_extras(DEVELOPMENT)
    assert sorted(requirements) == sorted(expected)


def test_the_ranges_leave_a_cluster_its_own_versions() -> None:
    """Only lower bounds, but for a major version of timm, whose modules are parts of our networks."""
    bounded = {each.name: str(each.specifier) for each in core() if {"<", "<=", "==", "~="} & operators(each)}
    assert set(bounded) == {"timm"}
    assert all(">=" in operators(each) for each in core())


def operators(requirement: Requirement) -> set[str]:
    return {each.operator for each in requirement.specifier}


def test_setup_cfg_allows_the_python_of_conda() -> None:
    oldest = re.fullmatch(r">=3\.(\d+)", setup_cfg()["options"]["python_requires"])
    pins = [entry for entry in conda_environment()["dependencies"] if str(entry).startswith("python=")]
    assert oldest is not None
    assert len(pins) == 1
    chosen = re.fullmatch(r"python=3\.(\d+)", pins[0])
    assert chosen is not None
    assert int(chosen[1]) >= int(oldest[1])
