"""Loads the last checkpoint of a run on any number of ranks, and saves the full state that was loaded."""

import argparse
from pathlib import Path

import torch

from horovod_volo.cluster.world import World
from horovod_volo.config.recipe import assemble, load_recipe
from horovod_volo.engine.checkpoint.files import find_checkpoint
from horovod_volo.engine.checkpoint.resuming import restore_state
from horovod_volo.engine.classification import Classification
from horovod_volo.engine.state import build_state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--shard-optimizer", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = World.connect()
    settings = load_recipe(str(options.run / "resolved.toml")) | {"shard_optimizer": options.shard_optimizer}
    config = assemble(settings, fallback_name="")
    device = torch.device("cpu")
    state, _ = build_state(config, world, Classification(), num_classes=10, device=device, finetune="")
    # Every rank but the first starts with values that differ from the checkpoint.
    if world.rank:
        for tensor in state.replicated_tensors():
            tensor.fill_(world.rank)
    restore_state(state, find_checkpoint(str(options.run)), world)
    loaded = {
        file: {name: tensor.detach().clone() for name, tensor in tensors.items()}
        for file, tensors in state.full_state_dict().items()
    }
    torch.save({**loaded, "step": state.step}, options.out / f"rank_{world.rank}.pt")


if __name__ == "__main__":
    main()
