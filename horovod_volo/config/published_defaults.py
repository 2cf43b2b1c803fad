"""What the published code takes for a flag that is not given, by family of networks.

The schema's own defaults are those of VOLO's main.py; here stands where another family's main.py has
others. They hold without a recipe, which states its settings itself. tests/published/test_defaults.py
compares both with the checkouts; docs/training.md tells what is left otherwise on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_volo.config.schema import Model

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "volo_": {},
    "lvvit_": {"batch_size": 32, "warmup_epochs": 5, "dense_weight": 1.0},
}


def published_defaults(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the published code of the chosen network has where our defaults are others."""
    model = flags.get("model", Model.model)
    return next((own for family, own in FAMILIES.items() if model.startswith(family)), {})


def told_defaults(setting: str) -> str:
    """Word for the help which families have another default of a setting."""
    own = {family: values[setting] for family, values in FAMILIES.items() if setting in values}
    return "".join(f"; {family}* without a recipe: {value}" for family, value in own.items())
