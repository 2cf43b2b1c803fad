"""timm's own train.py, from a checkout of timm, with our sizes of VOLO among its models.

    python -m horovod_volo.bench.peers_learning CHECKOUT FLAGS_OF_TRAIN_PY

The checkout's timm goes before an installed one. The networks are timm's VOLO under our names.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any


def main(checkout: str, flags: list[str]) -> None:
    """Run the script in this process as if it had been called by itself."""
    sys.path.insert(0, checkout)
    # Imported here: the first import of timm decides which timm it is.
    from horovod_volo.models.timm_api import let_posterize_keep_no_bits
    from horovod_volo.models.volo import SIZES

    let_posterize_keep_no_bits()
    _register(SIZES)
    script = Path(checkout) / "train.py"
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")


def _register(sizes: dict[str, dict[str, Any]]) -> None:
    """Add networks to timm's by name."""
    from timm.models import register_model

    for name, size in sizes.items():
        build: Any = partial(_build, name, size)
        build.__name__, build.__module__ = name, __name__
        register_model(build)


def _build(name: str, size: dict[str, Any], pretrained: bool = False, **settings: Any) -> Any:
    """Build timm's VOLO of a size; `pretrained` is how timm calls, and none of these is."""
    import timm
    from timm.models import build_model_with_cfg
    from timm.models.volo import VOLO

    settings["pretrained_cfg"] = timm.get_pretrained_cfg("volo_d1_224")
    return build_model_with_cfg(VOLO, name, pretrained, **settings, **size)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
