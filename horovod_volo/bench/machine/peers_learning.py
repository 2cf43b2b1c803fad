"""Runs timm's own train.py from a checkout of timm, with our sizes of VOLO among timm's models.

    python -m horovod_volo.bench.machine.peers_learning CHECKOUT FLAGS_OF_TRAIN_PY

The checkout's timm takes precedence over an installed one. The networks are timm's VOLO under our names.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any


def main(checkout: str, flags: list[str]) -> None:
    """Run the script in this process as if it had been called directly."""
    sys.path.insert(0, checkout)
    # Imported here: the first import of timm decides which timm is used.
    from horovod_volo.models.timm_api import let_posterize_keep_no_bits
    from horovod_volo.models.volo import SIZES

    # isort: split
    from timm.models import register_model

    let_posterize_keep_no_bits()
    for name, size in SIZES.items():
        build: Any = partial(_build, name, size)
        build.__name__, build.__module__ = name, __name__
        register_model(build)
    script = Path(checkout) / "train.py"
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")


def _build(name: str, size: dict[str, Any], pretrained: bool = False, **settings: Any) -> Any:
    """Build timm's VOLO of a size; timm passes `pretrained`, of which there are no weights."""
    import timm
    from timm.models import build_model_with_cfg
    from timm.models.volo import VOLO

    settings["pretrained_cfg"] = timm.get_pretrained_cfg("volo_d1_224")
    return build_model_with_cfg(VOLO, name, pretrained, **settings, **size)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
