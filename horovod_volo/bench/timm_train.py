"""Runs timm's own train.py from a checkout of timm, with our smallest VOLO among timm's models.

    python -m horovod_volo.bench.timm_train CHECKOUT FLAGS_OF_TRAIN_PY

The checkout's timm takes precedence over an installed one. The network is timm's VOLO with our sizes.
"""

import runpy
import sys
from pathlib import Path
from typing import Any


def main(checkout: str, flags: list[str]) -> None:
    """Run the script in this process as if it had been called directly."""
    sys.path.insert(0, checkout)
    # Imported here: the first import of timm decides which timm is used.
    from horovod_volo.models.timm_api import VOLO, allow_posterize_to_no_bits, get_pretrained_cfg
    from horovod_volo.models.volo import SIZES

    # isort: split
    from timm.models import build_model_with_cfg, register_model

    def volo_demo(pretrained: bool = False, **settings: Any) -> Any:
        # There is one if a folder's weights were requested, as those of a teacher are by local-dir:FOLDER.
        settings["pretrained_cfg"] = settings.get("pretrained_cfg") or get_pretrained_cfg("volo_d1_224")
        return build_model_with_cfg(VOLO, "volo_demo", pretrained, **settings, **SIZES["volo_demo"])

    register_model(volo_demo)
    allow_posterize_to_no_bits()
    script = Path(checkout) / "train.py"
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
