"""The short help, hints for the flags of other trainers, and completion in bash."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from horovod_volo.__main__ import COMMANDS
from horovod_volo.completion import script
from horovod_volo.config.arguments import hints
from horovod_volo.config.command_line import build_parser, parse
from horovod_volo.config.recipe import recipe_names
from horovod_volo.core.errors import UserError

FLAGS = set(build_parser()._option_string_actions)


def test_the_short_help_fits_on_a_screen_and_its_examples_are_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        parse(["-h"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 80
    pattern = r"^  (?:horovodrun -np 8 )?horovod-volo train (.*?)(?:    .*)?$"
    examples = re.findall(pattern, printed, re.MULTILINE)
    assert len(examples) == 4
    with pytest.raises(SystemExit):
        parse(["--help-all"])
    listed = capsys.readouterr().out
    for shown in (*FLAGS, "(default: 0.0016)", "(default: on)", "(default: 0.08 1)"):
        assert shown in listed
    for example in examples:
        parse(example.replace("--token-label-data", "--token-label --token-label-data").split())


def test_a_hint_names_flags_that_there_are_for_one_that_there_is_not() -> None:
    assert not FLAGS & hints().keys()
    assert set(re.findall(r"--[a-z][a-z-]*", " ".join(hints().values()))) <= FLAGS
    for spelled in ("--nproc-per-node", "--nproc_per_node", "--input-size", "-c"):  # torchrun has both
        hint = hints()[spelled.replace("_", "-")]
        with pytest.raises(UserError, match=re.escape(f"There is no flag {spelled}. {hint}")):
            parse(["images", spelled])


def completed(line: str, folder: Path, shell: str = "bash") -> list[str]:
    """Return what the shell offers for the last word of a line."""
    words = " ".join(f"'{word}'" for word in line.split(" "))
    ask = f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _horovod_volo"
    program = f"{script(shell)}\n{ask}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_commands_flags_values_and_files(tmp_path: Path) -> None:
    (tmp_path / "evening.jpg").touch()
    assert completed("horovod-volo ev", tmp_path) == ["evaluate"]
    assert completed("horovod-volo train --ep", tmp_path) == ["--epochs"]
    assert completed("horovod-volo evaluate --per", tmp_path) == ["--per-class"]
    assert completed("horovod-volo train --precision f", tmp_path) == ["fp32", "fp16"]
    assert completed("horovod-volo train --recipe demo", tmp_path) == ["demo"]
    assert set(completed("horovod-volo train --recipe volo_d1", tmp_path)) == {
        name for name in recipe_names() if name.startswith("volo_d1")
    }
    assert completed("horovod-volo labels gen", tmp_path) == ["generate"]
    assert completed("horovod-volo predict ev", tmp_path) == ["evening.jpg"]
    assert sorted(completed("horovod-volo ", tmp_path)) == sorted([*COMMANDS, "--help", "--version"])
    assert set(completed("horovod-volo train --", tmp_path)) == {f for f in FLAGS if f.startswith("--")}
    # A flag of several commands has the values of its own.
    assert completed("horovod-volo evaluate --test-mode r", tmp_path) == ["run"]
    assert completed("horovod-volo train --test-mode r", tmp_path) == []
