"""Warnings are errors in the processes that tests start, too, with the exceptions that setup.cfg lists."""

from __future__ import annotations

import configparser
from functools import cache
from pathlib import Path

SETUP = Path(__file__).parents[2] / "setup.cfg"


@cache
def python_warnings() -> str:
    """Return pytest's filterwarnings as a value of PYTHONWARNINGS.

    pytest applies its filters in its own process alone. Of a filter's fields the message is a regular
    expression in setup.cfg and literal text in PYTHONWARNINGS, which separates filters by commas.
    """
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(SETUP, encoding="utf-8")
    filters = setup["tool:pytest"]["filterwarnings"].split("\n")
    return ",".join(line for line in filters if line)
