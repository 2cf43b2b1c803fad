"""`horovod-volo`: the same as `python -m horovod_volo.NAME`, and a list of the commands."""

from __future__ import annotations

import configparser
import importlib.util
import runpy
import subprocess
import sys

import pytest

import horovod_volo.__main__ as command
from tests.documents import ROOT


@pytest.mark.parametrize("name", list(command.COMMANDS))
def test_a_command_is_its_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(runpy, "run_module", lambda module, **_: ran.append((module, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["horovod-volo", name, "--help"])
    assert command.main() == 0
    assert ran == [(f"horovod_volo.{name}", ["--help"])]
    assert importlib.util.find_spec(f"horovod_volo.{name}") is not None


def test_the_list_of_commands_and_the_versions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(*arguments: str, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["horovod-volo", *arguments])
        assert command.main() == status
        return "".join(capsys.readouterr())

    listed = printed()
    assert all(f"  {name}" in listed for name in command.COMMANDS)
    assert "Did you mean evaluate?" in printed("evalute", status=2)
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert printed("--version") == f"horovod_volo {settings['metadata']['version']}\n"
    module, _, function = settings["options.entry_points"]["console_scripts"].partition("=")[2].partition(":")
    assert (module.strip(), function) == (command.__spec__.name, "main")


def test_timm_is_importable_in_the_environment_of_tools_setup() -> None:
    """Without this package, also where torch is a CPU build; tools/setup declares torchvision's operators."""
    done = subprocess.run([sys.executable, "-c", "import timm"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
