"""Measures a fixed detector on held-out scenes, with any number of ranks, in a given order of images."""

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Model
from horovod_volo.config.task_settings import Detection
from horovod_volo.data.image_decoder import IMAGENET_NORMALIZATION
from horovod_volo.dense.box_evaluation import BoxEvaluation
from horovod_volo.dense.box_list import find_boxes, list_boxes
from horovod_volo.dense.pictures import EvaluationPictures
from horovod_volo.dense.ssd import build_ssd
from horovod_volo.dense.task import RankContext
from horovod_volo.models.precision import autocast

SIDE = 96


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("scenes", type=Path)
    parser.add_argument("--reversed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world, device = World.connect(), torch.device("cpu")
    images = list_boxes(find_boxes(options.scenes, "val"), None)
    if options.reversed:
        images = replace(images, numbers=images.numbers[::-1].copy())
    torch.manual_seed(0)
    network = build_ssd(Model(model="volo_demo", img_size=SIDE), len(images.classes)).eval()
    # Fresh weights find boxes everywhere, some of them right.
    settings = Detection(min_score=0.1)
    context = RankContext(world, device, 2, IMAGENET_NORMALIZATION, autocast("fp32", device))
    with closing(BoxEvaluation(images, Data(batch_size=4), settings, SIDE, context)) as evaluation:
        metrics = evaluation.measure(network, lambda images: None, pictures=EvaluationPictures(2)).metrics
    torch.save(metrics, options.out / f"rank_{world.rank}.pt")


if __name__ == "__main__":
    main()
