"""`horovod-volo`: the same as `python -m horovod_volo.NAME`, and a list of the commands."""

from __future__ import annotations

import configparser
import importlib.util
import runpy
import subprocess
import sys

import pytest
import shtab

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


@pytest.mark.parametrize(
    ("line", "offered"), [("ev", "evaluate"), ("train --ep", "--epochs"), ("labels gen", "generate")]
)
def test_bash_completes_commands_and_flags(line: str, offered: str) -> None:
    ask = f'words=(horovod-volo {line}); COMP_WORDS=("${{words[@]}}"); COMP_CWORD=$((${{#words[@]}} - 1))'
    completion = shtab.complete(command.build_parser(), "bash")
    program = f"{completion}\n{ask}; _shtab_horovod_volo; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [offered]


def test_timm_is_importable_in_the_environment_of_tools_setup() -> None:
    """Without this package, also where torch is a CPU build; tools/setup declares torchvision's operators."""
    done = subprocess.run([sys.executable, "-c", "import timm"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
