"""The short help, and hints for the flags of other trainers."""

from __future__ import annotations

import re

import pytest

from horovod_volo.config.arguments import hints
from horovod_volo.config.command_line import build_parser, parse
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
