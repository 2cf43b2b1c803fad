"""Prints the published networks' logits for fixed weights and images, which the unit tests have recorded.

HOROVOD_VOLO_PUBLISHED=... python -m tests.published.figures
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.published.checkouts import load, named_folder

NAMES = ("volo_d1", "lvvit_s")
UNIT_TESTS = Path(__file__).parents[1] / "unit"


def main() -> None:
    """Print the figures as Python code."""
    sys.path.insert(0, str(UNIT_TESTS))
    from formula_weights import fill, images
    from test_models_published_figures import BOX, summary

    published = load(named_folder())
    for name in NAMES:
        model = published.network(name)
        fill(model)
        pictures = images(2, 224)
        with torch.inference_mode(), published.fixed_box(name, BOX):
            evaluation = model.eval()(pictures)
            class_logits, token_logits, _ = model.train()(pictures)
        outputs: dict[str, Tensor] = {
            "evaluation": evaluation,
            "class": class_logits,
            "tokens": token_logits,
        }
        figures: dict[str, Any] = {what: summary(logits) for what, logits in outputs.items()}
        print(f"{name!r}: {figures},")


if __name__ == "__main__":
    main()
