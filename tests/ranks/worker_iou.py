"""Measures a fixed network on the held-out scenes, with any number of ranks, in a given order of images."""

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Model
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.data.image_decoder import IMAGENET_NORMALIZATION
from horovod_volo.dense.mean_iou import SceneEvaluation
from horovod_volo.dense.pictures import EvaluationPictures
from horovod_volo.dense.scene_list import find_layout, list_scenes
from horovod_volo.dense.task import RankContext
from horovod_volo.dense.upernet import UperNet
from horovod_volo.models.precision import autocast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("scenes", type=Path)
    parser.add_argument("--test-mode", default="whole")
    parser.add_argument("--reversed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = World.connect()
    scenes = list_scenes(options.scenes, find_layout(options.scenes), "val")
    if options.reversed:
        scenes = replace(scenes, names=scenes.names[::-1])
    torch.manual_seed(0)
    settings = Segmentation(
        scene_size=(192.0, 64.0),
        test_mode=options.test_mode,
        test_stride=43,
        head_width=16,
        auxiliary_width=16,
    )
    network = UperNet(Model(model="volo_demo", img_size=64), settings, 7).eval()
    device = torch.device("cpu")
    context = RankContext(world, device, 2, IMAGENET_NORMALIZATION, autocast("fp32", device))
    with closing(SceneEvaluation(scenes, Data(batch_size=4), settings, 64, context)) as evaluation:
        metrics = evaluation.measure(network, lambda images: None, pictures=EvaluationPictures(2)).metrics
    torch.save(metrics, options.out / f"rank_{world.rank}.pt")


if __name__ == "__main__":
    main()
