"""The result of an evaluation of classification, as lines of text and as a JSON record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_volo.core.errors import escape_controls
from horovod_volo.data.image_decoder import decoder_messages, image_decoder
from horovod_volo.engine.accuracy import ClassResult
from horovod_volo.evaluation.accuracy import EvalRequest, EvalResult


def text_of(request: EvalRequest, result: EvalResult, rows: Sequence[ClassResult]) -> list[str]:
    """Return the lines that are printed; `rows` are the classes to list."""
    counts, metrics, model = result.counts, result.counts.metrics(), result.model
    crops = "crop" if request.crops == 1 else f"{request.crops} crops"
    crops = crops if model.crop_mode == "center" else f"{model.crop_mode}, {crops}"
    properties = [
        ("weights", request.weights),
        ("model", f"{model.name}, {model.image_side} px, {crops} {result.crop_pct:g}, {request.precision}"),
        *(("", warning) for warning in model.messages),
        *(("decoder", message) for message in decoder_messages(request.image_decoder)),
        ("images", f"{counts.images:,} of {result.data}; {counts.bad_samples:,} damaged ones left out"),
        ("top-1", f"{metrics['top1']:.3f} %, {counts.top1:,} images"),
        ("top-5", f"{metrics['top5']:.3f} %, {counts.top5:,} images"),
        ("loss", f"{metrics['loss']:.5f}"),
    ]
    if result.real is not None:
        real = f"{result.real.accuracy:.3f} %, {result.real.right:,} of {result.real.images:,} images"
        properties.append(("ReaL", real))
    lines = [f"{name:<10}{value}" for name, value in properties]
    return [*lines, "", *_format_table(rows)] if rows else lines


def _format_table(rows: Sequence[ClassResult]) -> list[str]:
    names = [escape_controls(row.name) for row in rows]
    width = max(len("class"), *map(len, names))
    lines = [f"{'class':<{width}}  images   right      %  most often taken for"]
    for name, row in zip(names, rows, strict=True):
        mistaken = f"{row.mistaken_for} ({row.mistaken})" if row.mistaken else "-"
        lines.append(f"{name:<{width}}  {row.images:>6}  {row.right:>6}  {row.top1:>5.1f}  {mistaken}")
    return lines


def json_record(
    request: EvalRequest, result: EvalResult, ranks: int, rows: Sequence[ClassResult]
) -> dict[str, Any]:
    """Return the result as it is written to JSON."""
    counts, model = result.counts, result.model
    record: dict[str, Any] = {
        "weights": request.weights,
        "model": model.name,
        "data": result.data,
        "use_ema": request.use_ema,
        "aux_head": model.has_aux_head,
        "img_size": model.image_side,
        "crop_pct": result.crop_pct,
        "crop_mode": model.crop_mode,
        "crops": request.crops,
        "mean": model.mean,
        "std": model.std,
        "precision": request.precision,
        "batch_size": request.batch_size,
        "image_decoder": image_decoder(request.image_decoder).name,
        "ranks": ranks,
        **counts.metrics(),
        "top1_right": counts.top1,
        "top5_right": counts.top5,
    }
    if result.real is not None:
        accuracy = {"accuracy": result.real.accuracy, **result.real._asdict()}
        record["real"] = {"file": request.real, **accuracy}
    if rows:
        record["classes"] = [{**row._asdict(), "top1": row.top1} for row in rows]
    return record
