"""Other commands read the settings that they share with training from the same schema."""

from __future__ import annotations

import pytest

from horovod_volo import labels
from horovod_volo.config import command_line
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError

COMMANDS = {
    "generate": ["generate", "images", "store", "--teacher", "volo_demo"],
    "import": ["import", "maps", "store"],
    "verify": ["verify", "store"],
}


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("generate", "--batch-size", "0"),
        ("generate", "-b", "many"),
        ("generate", "--img-size", "31"),
        ("generate", "--binding", "nume"),
        ("verify", "--img-size", "-1"),
        ("import", "--workers", "-1"),
        ("import", "-j", "1.5"),
        ("import", "--bad-samples", "ignore"),
    ],
)
def test_a_wrong_value_has_the_message_of_training(
    command: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as in_training:
        command_line.parse(["images", flag, value])
    assert labels.main([*COMMANDS[command], flag, value]) == 2
    assert capsys.readouterr().err == f"error: {in_training.value}\n"


def test_defaults_are_those_of_training() -> None:
    settings, parser = Config(), labels.build_parser()
    generate = parser.parse_args(COMMANDS["generate"])
    assert (generate.batch_size, generate.binding) == (settings.data.batch_size, settings.launch.binding)
    assert parser.parse_args(COMMANDS["import"]).workers == settings.data.workers
    assert parser.parse_args(COMMANDS["verify"]).map_geometry == settings.objective.map_geometry


def test_defaults_that_differ_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        labels.main(["import", "--help"])
    assert "(default: fail)" in capsys.readouterr().out
