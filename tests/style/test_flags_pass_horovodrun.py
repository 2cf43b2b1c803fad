"""None of our flags is an ambiguous prefix of flags of horovodrun, which parses the entire command line.

`--timeline` was one: every launch ended with "ambiguous option".
"""

from __future__ import annotations

import pytest
from horovod.runner import launch

from horovod_volo import evaluate, labels
from horovod_volo.config.command_line import build_parser

PARSERS = {"train": build_parser(), "evaluate": evaluate.build_parser(), "labels": labels.build_parser()}


def flags_of(parser) -> list[str]:
    flags = []
    for action in parser._actions:
        flags += action.option_strings
        for inner in (action.choices or {}).values() if hasattr(action, "add_parser") else ():
            flags += flags_of(inner)
    return flags


def is_accepted(flag: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "2", "python", "-m", "entry", flag, "value"])
    try:
        return launch.parse_args().command == ["python", "-m", "entry", flag, "value"]
    except SystemExit:
        return False


@pytest.mark.parametrize("entry", PARSERS)
def test_horovodrun_accepts_commands_with_our_flags(entry, monkeypatch, capsys):
    flags = flags_of(PARSERS[entry])
    assert len(flags) > 5
    assert [flag for flag in flags if not is_accepted(flag, monkeypatch)] == []
    assert not is_accepted("--timeline", monkeypatch)
