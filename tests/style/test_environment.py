"""environment.yml and setup.cfg list the same packages with the same versions.

Only Horovod is missing in environment.yml: tools/build_horovod builds the version of setup.cfg.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def setup_requirements() -> list[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return lines_of(setup["options"]["install_requires"]) + lines_of(setup["options.extras_require"]["test"])


def conda_environment() -> dict[str, Any]:
    environment: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    return environment


def pip_requirements() -> list[str]:
    groups = [entry["pip"] for entry in conda_environment()["dependencies"] if isinstance(entry, dict)]
    assert len(groups) == 1
    return list(groups[0])


def test_conda_installs_the_requirements_of_setup_cfg() -> None:
    built_here = [line for line in setup_requirements() if line.startswith("horovod==")]
    assert len(built_here) == 1
    assert sorted(pip_requirements() + built_here) == sorted(setup_requirements())


def test_setup_cfg_allows_the_python_of_conda() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    oldest = re.fullmatch(r">=3\.(\d+)", setup["options"]["python_requires"])
    pins = [entry for entry in conda_environment()["dependencies"] if str(entry).startswith("python=")]
    assert oldest is not None
    assert len(pins) == 1
    chosen = re.fullmatch(r"python=3\.(\d+)", pins[0])
    assert chosen is not None
    assert int(chosen[1]) >= int(oldest[1])


def test_versions_that_the_tools_read_are_exact() -> None:
    # tools/setup and tools/build_horovod read these from setup.cfg with sed.
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    for name in ("torch", "horovod"):
        assert len(re.findall(rf"^ *{name}==\d+\.\d+\.\d+$", text, flags=re.MULTILINE)) == 1
