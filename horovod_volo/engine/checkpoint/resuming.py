"""Going on from a checkpoint: which one, whether it is this run's, and the same state on all ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from horovod_volo.cluster.world import World
from horovod_volo.config.derived import derive
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.engine.checkpoint.files import (
    Files,
    find_checkpoint,
    has_checkpoint,
    read_state,
    read_tensors,
)
from horovod_volo.engine.checkpoint.saving import checkpoint_facts
from horovod_volo.engine.context import run_folder
from horovod_volo.engine.state import TrainState
from horovod_volo.models.aux_head import AUX_HEAD


def checkpoint_to_resume(config: Config, world: World, train: Catalog) -> Path | None:
    """Choose the checkpoint to go on from, the same on all ranks; None to begin. Collective."""
    return world.run_on_rank_zero(partial(_choose_own, config, world.size, train))


def _choose_own(config: Config, ranks: int, train: Catalog) -> Path | None:
    """Choose a checkpoint and hold it to this run's settings: soon, before a network is built for it."""
    checkpoint = _choose(config)
    if checkpoint:
        own = checkpoint_facts(config, derive(config, ranks=ranks, images=len(train)), train)
        _check_facts(read_state(checkpoint), own, checkpoint, ranks)
    return checkpoint


def _choose(config: Config) -> Path | None:
    folder = run_folder(config)
    if config.run.resume == "auto":
        return find_checkpoint(str(folder)) if has_checkpoint(folder) else None
    if config.run.resume:
        return _not_amidst(folder, find_checkpoint(config.run.resume))
    if has_checkpoint(folder):
        raise UserError(
            f"{folder} already holds a run. Add --resume auto to go on with it, or give this run another "
            "--name."
        )
    return None


def _not_amidst(folder: Path, checkpoint: Path) -> Path:
    """Refuse to go on in a run folder whose own checkpoints would be mixed with those to come."""
    if has_checkpoint(folder):
        newest = find_checkpoint(str(folder))
        if newest.resolve() != checkpoint.resolve():
            raise UserError(
                f"{folder} already holds a run up to {newest.name}, which does not go on from {checkpoint}. "
                "Give this run another --name, or remove that run's later checkpoints."
            )
    return checkpoint


def restore(state: TrainState, checkpoint: Path | None, world: World) -> list[str]:
    """Give all ranks rank 0's state: a checkpoint's, or the fresh one. Collective: every rank calls this.

    Return remarks about what of the checkpoint was not taken.
    """
    # Only rank 0 reads: a checkpoint's tensors are too many to be shared as one object.
    saved = world.run_on_all_ranks(
        lambda: read_tensors(checkpoint) if checkpoint and world.is_rank_zero else {}
    )
    facts = world.run_on_rank_zero(lambda: read_state(checkpoint) if checkpoint else {})
    state.step = facts.get("step", 0)
    if facts.get("scaler"):
        state.scaler.load_state_dict(facts["scaler"])
    fitting = _without_aux_head(saved) if getattr(state.model, "aux_head", None) is None else saved
    state.restore(fitting, world)
    world.assert_identical(state.replicated_tensors(), "Weights or optimizer state")
    left_out = sum(map(len, saved.values())) - sum(map(len, fitting.values()))
    return [f"aux_head of {checkpoint} is left out: this run does not train it"] if left_out else []


def _without_aux_head(saved: Files) -> Files:
    """Leave out the auxiliary head, which earlier versions kept, untrained, in runs without token labels."""
    return {
        file: {name: tensor for name, tensor in tensors.items() if not name.startswith(AUX_HEAD)}
        for file, tensors in saved.items()
    }


def _check_facts(saved: dict[str, Any], own: dict[str, Any], checkpoint: Path, ranks: int) -> None:
    # Earlier versions did not write these: averages were always warmed up, and there was always a head.
    saved = {"ema_warmup": saved.get("averaged", False), "aux_head": own["aux_head"]} | saved
    for name, value in own.items():
        if saved.get(name) != value:
            raise UserError(
                f"Checkpoint {checkpoint} has {name} {saved.get(name)}, this run has {value}: it would not "
                f"go on where that one stopped. {_remedy(name, saved.get(name), ranks)}"
            )


def _remedy(name: str, wanted: Any, ranks: int) -> str:
    if name == "model":
        return f"Give --model {wanted}."
    if name == "global_batch" and wanted % ranks == 0:
        return (
            f"With {ranks} ranks, batch size x accumulation must be {wanted // ranks}. "
            f"--global-batch {wanted} finds both."
        )
    if name == "global_batch":
        return f"Start a number of ranks that divides {wanted}."
    if name == "ema_warmup":
        return "Give --ema-warmup." if wanted else "Drop --ema-warmup."
    if name == "aux_head":
        labels = "--token-label, and --dense-weight above 0" if wanted else "--no-token-label"
        return f"Give {labels}, or begin a new run with --finetune."
    if name in ("images", "image_list"):
        return "Bring the training images back as they were, or begin a new run with --finetune."
    return "Give the settings of its resolved.toml, or begin a new run with --finetune."
