"""Evaluate a network of classification on one rank or many: each rank predicts its part of the images."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from horovod_volo.cluster.world import World, rank_resources
from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Run
from horovod_volo.core.errors import UserError, escape_controls
from horovod_volo.data.image_decoder import Normalization, decoder_messages, image_decoder
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.images.split_folder import HeldOut, shortened
from horovod_volo.data.loader import EvalLoader
from horovod_volo.engine.accuracy import ClassResult, EvalCounts, ImageScores, class_results
from horovod_volo.engine.classification_data import catalog_folder, shared_catalog
from horovod_volo.evaluation.imagenet import count_real, numbered_catalog, read_real
from horovod_volo.evaluation.predictions import load_network
from horovod_volo.evaluation.task_results import EVALUATIONS, Evaluated, Progress
from horovod_volo.models.precision import autocast, prepare_precision
from horovod_volo.models.pretrained import PretrainedModel, settings_of_run
from horovod_volo.models.weights import TIMM


def evaluate(request: Namespace, world: World, progress: Progress) -> Evaluated:
    """Evaluate a model on every image once. Collective: every rank calls this."""
    resources = rank_resources(world)
    world.run_on_all_ranks(partial(image_decoder, request.image_decoder))  # raises if it is not installed
    catalog = _list_images(request, world)
    model = world.run_on_all_ranks(partial(_load_model, request, catalog))
    world.assert_identical(model.network.parameters(), "The weights")
    read = partial(read_real, request.real, catalog, model.num_classes)
    real = world.run_on_all_ranks(read) if request.real else None
    model.network.to(resources.device)
    prepare_precision(model.network, request.precision, resources.device)
    crop_pct = request.crop_pct or model.crop_pct
    loader = EvalLoader(
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
    )
    scores, done, own = ImageScores(resources.device), 0, len(range(world.rank, len(catalog), world.size))
    with closing(loader), torch.inference_mode(), autocast(request.precision, resources.device):
        for batch in loader:
            scores.add(batch, model.network(batch.images))
            done += len(batch.indices)
            progress(done, own)
    counts, predictions, _ = scores.gather(catalog, world)
    record = _record(request, model, crop_pct, catalog.source, counts, world.size)
    if real is not None:
        record["real"] = {"file": request.real, **count_real(real, predictions)}
    lines = _lines(request, model.messages, record)
    if rows := class_results(catalog.classes, catalog.targets, predictions)[: request.per_class]:
        lines += ["", *_format_table(rows)]
        record["classes"] = [{**row._asdict(), "top1": row.top1} for row in rows]
    bad = list(chain(*world.allgather_object(loader.bad_samples.new_messages())))
    return Evaluated(counts.metrics(), lines, record, bad)


def _list_images(request: Namespace, world: World) -> Catalog:
    if request.v2:
        return numbered_catalog(request.data_dir, world)
    folder = catalog_folder(request.catalog_dir, Run().output, world)
    held_out = world.run_on_rank_zero(lambda: held_out_by(request.weights, request.data_dir))
    cache = Data(cache_dir=request.cache_dir, cache_gib=request.cache_gib)
    return shared_catalog(request.data_dir, request.split, folder, world, held_out, cache)


def held_out_by(weights: str, data_dir: str) -> HeldOut:
    """Return which images the run of these weights held out, if it was trained on this data folder."""
    run = settings_of_run(weights)
    if Path(data_dir).resolve() != Path(run.get("data_dir", "")).resolve():
        return HeldOut()
    return HeldOut(run.get("val_split", ""), run.get("val_share", 0.0), run.get("seed", 0))


def _load_model(request: Namespace, catalog: Catalog) -> PretrainedModel:
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


def _number_by_name(catalog: Catalog, names: tuple[str, ...], weights: str) -> None:
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


def _record(
    request: Namespace, model: PretrainedModel, crop_pct: float, data: str, counts: EvalCounts, ranks: int
) -> dict[str, Any]:
    return {
        **{name: getattr(request, name) for name in ("weights", "use_ema", "precision", "batch_size")},
        "model": model.name,
        "data": data,
        "aux_head": model.has_aux_head,
        "img_size": model.image_side,
        "crop_pct": crop_pct,
        "crop_mode": model.crop_mode,
        "mean": model.mean,
        "std": model.std,
        "image_decoder": image_decoder(request.image_decoder).name,
        "ranks": ranks,
        **counts.metrics(),
        "top1_right": counts.top1,
        "top5_right": counts.top5,
    }


def _lines(request: Namespace, messages: Sequence[str], record: Mapping[str, Any]) -> list[str]:
    bad, real = record["bad_samples"], record.get("real")
    crop = "crop" if record["crop_mode"] == "center" else f"{record['crop_mode']}, crop"
    how = f"{record['img_size']} px, {crop} {record['crop_pct']:g}, {request.precision}"
    properties = [
        ("weights", request.weights),
        ("model", f"{record['model']}, {how}"),
        *(("", message) for message in messages),
        *(("decoder", message) for message in decoder_messages(request.image_decoder)),
        ("images", f"{record['images']:,} of {record['data']}; {bad:,} damaged ones left out"),
        ("top-1", f"{record['top1']:.3f} %, {record['top1_right']:,} images"),
        ("top-5", f"{record['top5']:.3f} %, {record['top5_right']:,} images"),
        ("loss", f"{record['loss']:.5f}"),
    ]
    if real:
        counted = f"{real['right']:,} of {real['images']:,} images"
        properties.append(("ReaL", f"{real['accuracy']:.3f} %, {counted}"))
    return [f"{name:<10}{value}" for name, value in properties]


def _format_table(rows: Sequence[ClassResult]) -> list[str]:
    names = [escape_controls(row.name) for row in rows]
    width = max(len("class"), *map(len, names))
    lines = [f"{'class':<{width}}  images   right      %  most often taken for"]
    for name, row in zip(names, rows, strict=True):
        mistaken = f"{row.mistaken_for} ({row.mistaken})" if row.mistaken else "-"
        lines.append(f"{name:<{width}}  {row.images:>6}  {row.right:>6}  {row.top1:>5.1f}  {mistaken}")
    return lines


EVALUATIONS.register("classification", evaluate)
