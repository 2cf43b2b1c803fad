"""The schema as plain data for tests of the command line and of recipes, and values to set."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from horovod_volo.config.schema import Config, all_settings

# Group, name and default of each setting.
FIELDS = [(setting.group, setting.name, setting.default) for setting in all_settings()]
NAMES = [name for _, name, _ in FIELDS]
# Two values for each setting, the first of which is not the default; otherwise the type decides.
EXAMPLES: dict[str, tuple[Any, Any]] = {
    "img_size": (64, 96),
    "epochs": (30, 40),
    "mean": ((0.5, 0.25, 0.0), (0.5, 0.5, 0.5)),
    "std": ((0.5, 0.25, 1.0), (0.5, 0.5, 0.5)),
    "decay_milestones": ("5,20", "30"),
    "ratio": ((0.9, 1.1), (0.5, 2.0)),
    "aa": ("", "rand-m7-n3"),
    "reprob": (0.5, 0.75),
    "opt": ("sgd", "lars"),
    "layer_decay": (0.75, 0.5),
    "model_kwargs": ("drop_rate=0.1", "mlp_ratio=4 layers=(1,2)"),
    "map_geometry": ("whole", "centre-crop:576:576"),
}
MAPS = "--token-label --token-label-data maps"
# Settings that a setting requires.
COMPANIONS = {
    "reproducible": ["--global-batch", "64"],
    "mixup": ["--no-mix-token"],
    "cutmix": ["--no-mix-token"],
    "token_label_data": ["--token-label"],
    "allow_mismatch": ["--finetune", "weights.pth"],
    "use_ema": ["--finetune", "weights.pth"],
    "ema_warmup": ["--ema-decay", "0.9"],
    "map_geometry": MAPS.split(),
    "ground_truth": MAPS.split(),
}


def value_of(config: Config, name: str) -> Any:
    return next(setting.value_in(config) for setting in all_settings() if setting.name == name)


def examples(name: str, default: Any) -> tuple[Any, Any]:
    if name in EXAMPLES:
        return EXAMPLES[name]
    kind = next(setting.kind for setting in all_settings() if setting.name == name)
    if get_origin(kind) is Literal:
        first, *others = (choice for choice in get_args(kind) if choice != default)
        return first, next(iter(others), default)
    kinds: dict[type, tuple[Any, Any]] = {
        bool: (not default, default),
        int: (11, 12),
        float: (0.25, 0.75),
        str: ("one", "two"),
        tuple: ((0.25, 0.5), (0.125, 0.75)),
    }
    return kinds[type(default)]


def words(name: str, value: Any) -> list[str]:
    """Spell a setting on the command line."""
    if name == "data_dir":
        return [value]
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *map(repr, value)] if isinstance(value, tuple) else [f"--{flag}", str(value)]


def recipe_of(folder: Path, text: str) -> str:
    path = folder / "some.toml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(path)
