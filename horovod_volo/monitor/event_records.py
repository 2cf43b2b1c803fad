"""TensorBoard's events as the bytes of their records: scalars, text, pictures, hparams, a layout.

The bytes are appended to a file of events. TensorBoard's own EventFileWriter could not do that: after a write
that failed it drops what it has, and writes nothing more. Invariant: after `session_start`, TensorBoard
ignores earlier events of its step and later ones, whatever they show.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from horovod_volo.monitor.logger import HparamValue, Picture

_RGB = 3  # TensorBoard's number of this color space

# By category and title: "Multiline" and patterns of tags, or "Margin" and the tags of value, lower and upper.
Layout = Mapping[str, Mapping[str, tuple[str, Sequence[str]]]]


def file_start(first_step: int) -> bytes:
    """Return the first events of a file: its version, and the step from which on earlier files are void."""
    return _event(0, file_version="brain.Event:2") + session_start(first_step)


def session_start(first_step: int) -> bytes:
    """Return the event after which TensorBoard ignores earlier ones from a step on."""
    return _event(first_step, session_log=SessionLog(status=SessionLog.START))


def scalars(step: int, values: Mapping[str, float]) -> bytes:
    """Return a point of each curve, by tag, in one event."""
    points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    return _event(step, summary=Summary(value=points))


def text(step: int, tag: str, markdown: str) -> bytes:
    """Return a text."""
    return _event(step, summary=text_pb(tag, markdown))


def picture(step: int, tag: str, encoded: Picture) -> bytes:
    """Return a picture."""
    png, width, height = encoded
    image = Summary.Image(width=width, height=height, colorspace=_RGB, encoded_image_string=png)
    return _event(step, summary=Summary(value=[Summary.Value(tag=tag, image=image)]))


def session_hparams(step: int, values: Mapping[str, HparamValue], metrics: Sequence[str]) -> bytes:
    """Return the hyperparameters of a run that begins and the tags of its metrics."""
    # torch takes booleans for numbers.
    shown = {name: str(value) if isinstance(value, bool) else value for name, value in values.items()}
    experiment, start, _ = summary.hparams(shown, dict.fromkeys(metrics))  # type: ignore[no-untyped-call]
    return _event(step, summary=experiment) + _event(step, summary=start)


def session_end(step: int) -> bytes:
    """Return that the run is finished, for the plugin of hyperparameters."""
    return _event(step, summary=summary.hparams({}, {})[2])  # type: ignore[no-untyped-call]


def layout(step: int, charts: Layout) -> bytes:
    """Return the charts of the tab of custom scalars."""
    return _event(step, summary=summary.custom_scalars(charts))  # type: ignore[no-untyped-call]


def _event(step: int, **content: Any) -> bytes:
    """Return an event as a record of its file."""
    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
    return record.getvalue()
