"""A network trained without token labels is evaluated by its class token: its other head learned nothing."""

from __future__ import annotations

import pytest
import torch

from horovod_volo.bench.synthetic import checked_config, random_batch, step_of, synthetic_job
from horovod_volo.cluster.world import World
from horovod_volo.engine.job import Job
from horovod_volo.objective.mixtoken import NO_BOX

CLASSES, SIDE, BATCH = 10, 32, 4
_CPU = torch.device("cpu")


def trained_job(model: str, *, token_label: bool) -> Job:
    """Return a run after two steps on random images."""
    settings = {"model": model, "img_size": SIDE, "batch_size": BATCH, "lr": 1e-3, "warmup_epochs": 0}
    config = checked_config(settings | {"token_label": token_label, "mix_token": False})
    job = synthetic_job(config, World.alone(), CLASSES)
    step = step_of(job, random_batch(config, CLASSES, _CPU, seed=0))
    step(), step()
    return job


def both_logits(job: Job) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what evaluation goes by, and the logits of the class and of the tokens, of other images."""
    model = job.state.model.eval()
    images = torch.randn(BATCH, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        class_logits, token_logits = model.training_logits(images, NO_BOX.exchange)  # type: ignore[operator]
        return model(images), class_logits, token_logits


@pytest.mark.parametrize("model", ["volo_demo", "lvvit_t"])
def test_an_untrained_token_head_has_no_say(model: str) -> None:
    evaluated, class_logits, token_logits = both_logits(trained_job(model, token_label=False))
    assert not token_logits.any()
    assert torch.equal(evaluated, class_logits)


@pytest.mark.parametrize("model", ["volo_demo", "lvvit_t"])
def test_a_trained_one_has(model: str) -> None:
    evaluated, class_logits, token_logits = both_logits(trained_job(model, token_label=True))
    assert token_logits.any()
    torch.testing.assert_close(evaluated, class_logits + 0.5 * token_logits.amax(dim=1))
