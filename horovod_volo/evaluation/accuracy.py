"""Evaluate a trained model on one rank or many: each rank predicts its part of the images.

Whatever can be wrong with the request is checked before the first image is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from horovod_volo.cluster.resources import RankResources, rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Run
from horovod_volo.core.batch import EvalBatch
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import DecoderName, image_decoder
from horovod_volo.data.images.image_list import ImageList
from horovod_volo.data.images.split_folder import HeldOut, Split, shortened
from horovod_volo.data.loader import EvalLoader
from horovod_volo.data.pipeline import Normalization
from horovod_volo.engine.accuracy import (
    ClassResult,
    EvalCounts,
    PredictionCollector,
    class_results,
    count_correct,
    sum_counts,
)
from horovod_volo.engine.classification_data import CacheSettings, catalog_folder, shared_catalog
from horovod_volo.evaluation.imagenet import RealCounts, count_real, numbered_catalog, read_real
from horovod_volo.evaluation.predictions import load_network
from horovod_volo.models.precision import autocast, fix_convolutions, set_tf32
from horovod_volo.models.pretrained import AuxHead, CropAverage, PretrainedModel, settings_of_run
from horovod_volo.models.weights import TIMM

Progress = Callable[[int, int], None]  # given this rank's images that are done, and all of its images


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """The model, the images and the settings of an evaluation; by default the model is as it was trained."""

    data_dir: str
    weights: str
    model: str = ""  # empty: the model of the run that the weights are in
    use_ema: bool  # the averaged weights, where the source holds raw and averaged ones
    aux_head: AuxHead = "auto"  # whether the auxiliary head's logits are added
    img_size: int = 0  # 0: the one of training
    mean: tuple[float, ...] = ()  # of training pixels, if the weights do not record it; empty: the model's
    std: tuple[float, ...] = ()  # likewise
    crop_pct: float  # 0: the model's own
    crops: int = 1  # of each image, whose probabilities are averaged
    batch_size: int  # per rank
    workers: int  # 0: one per core of the rank
    image_decoder: DecoderName
    precision: str
    split: Split
    catalog_dir: str  # empty: inside the default --output, if there are several ranks
    real: str = ""  # ImageNet-ReaL's file; empty: none
    v2: bool = False  # the images are ImageNet-V2's
    cache_dir: str = ""  # for blocks of shards on a server
    cache_gib: float = 0.0
    images: Callable[[World], ImageList] | None = None  # those of a program, instead of the data folder's


@dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation, the same on every rank."""

    model: PretrainedModel
    crop_pct: float
    data: str  # the folder of the images
    counts: EvalCounts
    real: RealCounts | None
    classes: list[ClassResult]  # in order of accuracy, the worst first
    bad_samples: list[str]  # one message for each damaged image


def measure_accuracy(request: EvalRequest, world: World, progress: Progress) -> EvalResult:
    """Evaluate a model on every image once. Collective: every rank calls this."""
    resources = rank_resources(world)
    world.run_on_all_ranks(partial(image_decoder, request.image_decoder))  # raises if it is not installed
    catalog = _list_images(request, world)
    model = world.run_on_all_ranks(partial(_load_model, request, catalog))
    world.assert_identical(model.network.parameters(), "The weights")
    read = partial(read_real, request.real, catalog, model.num_classes)
    real = world.run_on_all_ranks(read) if request.real else None
    model.network.to(resources.device)
    set_tf32(request.precision)
    fix_convolutions(model.network, request.precision, resources.device)
    crop_pct = request.crop_pct or model.crop_pct
    loader = _build_loader(request, catalog, model, crop_pct, resources, world)
    network = model.network if request.crops == 1 else CropAverage(model.network)
    own = len(range(world.rank, len(catalog), world.size))
    collector = PredictionCollector()

    def on_batch(batch: EvalBatch, predictions: Tensor, probabilities: Tensor) -> None:
        collector.add(batch, predictions, probabilities)
        progress(collector.done, own)

    with closing(loader), torch.inference_mode(), autocast(request.precision, resources.device):
        rank_counts = count_correct(network, loader, resources.device, on_batch)
    counts = world.run_on_all_ranks(partial(sum_counts, rank_counts, catalog, world))
    predictions, _ = collector.gather(world, len(catalog))
    return EvalResult(
        model=model,
        crop_pct=crop_pct,
        data=catalog.source,
        counts=counts,
        real=None if real is None else count_real(real, predictions),
        classes=class_results(catalog.classes, catalog.targets, predictions),
        bad_samples=list(chain(*world.allgather_object(loader.bad_samples.new_messages()))),
    )


def check_writable(file: str) -> None:
    """Raise UserError if the file of `--json` cannot be created, before the evaluation starts."""
    folder = Path(file).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise UserError(f"--json cannot write {file}. Name a file in an existing, writable folder.")


def _list_images(request: EvalRequest, world: World) -> ImageList:
    if request.images is not None:
        return request.images(world)
    if request.v2:
        return numbered_catalog(request.data_dir, world)
    folder = catalog_folder(request.catalog_dir, Run().output, world)
    held_out = world.run_on_rank_zero(lambda: held_out_by(request.weights, request.data_dir))
    cache = CacheSettings(request.cache_dir, request.cache_gib)
    return shared_catalog(request.data_dir, request.split, folder, world, held_out, cache)


def held_out_by(weights: str, data_dir: str) -> HeldOut:
    """Return which images the run of these weights held out, if it was trained on this data folder."""
    run = settings_of_run(weights)
    if Path(data_dir).resolve() != Path(run.get("data_dir", "")).resolve():
        return HeldOut()
    return HeldOut(run.get("val_split", ""), run.get("val_share", 0.0), run.get("seed", 0))


def _load_model(request: EvalRequest, catalog: ImageList) -> PretrainedModel:
    model = load_network(request.weights, request)
    if model.class_names and not request.v2 and not request.weights.startswith(TIMM):
        _number_by_name(catalog, model.class_names, request.weights)
    if model.num_classes != len(catalog.classes):
        raise UserError(
            f"{catalog.source} has {len(catalog.classes)} class folders, but the network of "
            f"{request.weights} has {model.num_classes} classes. Give images of the classes that it was "
            "trained on."
        )
    return model


def _number_by_name(catalog: ImageList, names: tuple[str, ...], weights: str) -> None:
    """Give each class the number that it had in training; raise UserError if it was not in training."""
    known = set(names)
    unknown = [name for name in catalog.classes if name not in known]
    if unknown:
        raise UserError(
            f"{catalog.source} has classes that the network of {weights} was not trained on: "
            f"{shortened(unknown)}. Its classes are {shortened(names)}. Name the folders like these, or "
            "leave the others out."
        )
    if catalog.classes != names:
        catalog.number_as(names)


def _build_loader(
    request: EvalRequest,
    catalog: ImageList,
    model: PretrainedModel,
    crop_pct: float,
    resources: RankResources,
    world: World,
) -> EvalLoader:
    return EvalLoader(
        catalog,
        # No number of damaged images ends the evaluation: the result names and counts them.
        Data(
            batch_size=request.batch_size,
            image_decoder=request.image_decoder,
            bad_samples="skip",
            bad_samples_limit=len(catalog),
        ),
        image_size=model.image_side,
        crop_pct=crop_pct,
        crop_mode=model.crop_mode,
        rank=world.rank,
        size=world.size,
        device=resources.device,
        threads=request.workers or resources.threads,
        normalization=Normalization(model.mean, model.std),
        interpolation=model.interpolation,
        crops=request.crops,
    )
