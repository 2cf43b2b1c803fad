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
    for example in examples:
        parse(example.replace("--token-label-data", "--token-label --token-label-data").split())


@pytest.mark.parametrize("flag", sorted(hints()))
def test_a_hint_names_flags_that_there_are_for_one_that_there_is_not(flag: str) -> None:
    assert flag not in FLAGS
    assert set(re.findall(r"--[a-z][a-z-]*", hints()[flag])) <= FLAGS
    with_underscores = "--" + flag.lstrip("-").replace("-", "_")  # torchrun has both spellings
    for spelled in (flag, with_underscores if flag.startswith("--") else flag):
        with pytest.raises(UserError, match=re.escape(f"There is no flag {spelled}. {hints()[flag]}")):
            parse(["images", spelled])
