"""`horovod-volo`: the same as `python -m horovod_volo.NAME`, and a list of the commands."""

from __future__ import annotations

import configparser
import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_volo.__main__ as command

ROOT = Path(__file__).parents[2]


def started(*arguments: str) -> tuple[int, str]:
    command_line = [sys.executable, "-m", "horovod_volo", *arguments]
    done = subprocess.run(command_line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", list(command.COMMANDS))
def test_a_command_is_its_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(runpy, "run_module", lambda module, **_: ran.append((module, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["horovod-volo", name, "--help"])
    assert command.main() == 0
    assert ran == [(f"horovod_volo.{name}", ["--help"])]
    assert importlib.util.find_spec(f"horovod_volo.{name}") is not None


def test_arguments_and_exit_status_are_passed_on() -> None:
    status, output = started("evaluate", "/nowhere", "--weights", "/nowhere", "--scales", "x")
    assert status == 2
    assert "--scales" in output


def test_without_a_command_all_are_listed() -> None:
    status, output = started()
    assert status == 0
    assert all(f"  {name}" in output for name in command.COMMANDS)


def test_the_versions_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["horovod-volo", "--version"])
    assert command.main() == 0
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    printed = capsys.readouterr().out
    assert printed.startswith(f"horovod_volo {settings['metadata']['version']} (torch ")
    assert ", horovod 0." in printed
    module, _, function = settings["options.entry_points"]["console_scripts"].partition("=")[2].partition(":")
    assert (module.strip(), function) == (command.__spec__.name, "main")


def test_a_mistyped_command_gets_a_hint() -> None:
    status, output = started("evalute")
    assert status == 2
    assert "Did you mean evaluate?" in output


def test_timm_is_importable_in_the_environment_of_tools_setup() -> None:
    """Without this package, also where torch is a CPU build; tools/setup declares torchvision's operators."""
    done = subprocess.run([sys.executable, "-c", "import timm"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
