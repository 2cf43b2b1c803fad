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

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from horovod_volo.monitor.logger import HparamValue, Picture

_RGB = 3  # TensorBoard's number of this color space


def file_start(first_step: int) -> bytes:
    """Return the first events of a file: its version, and the step from which on earlier files are void."""
    return _event(0, file_version="brain.Event:2") + session_start(first_step)


def session_start(first_step: int) -> bytes:
    """Return the event after which TensorBoard ignores earlier ones from a step on."""
    return _event(first_step, session_log=SessionLog(status=SessionLog.START))


def scalars(step: int, values: Mapping[str, float], description: str = "") -> bytes:
    """Return a point of each curve, by tag, in one event."""
    metadata = scalar_metadata.create_summary_metadata(display_name=None, description=description)
    points = [Summary.Value(tag=tag, simple_value=value, metadata=metadata) for tag, value in values.items()]
    return _event(step, summary=Summary(value=points))


def text(step: int, tag: str, markdown: str) -> bytes:
    """Return a text."""
    return _event(step, summary=text_pb(tag, markdown))


def picture(step: int, tag: str, encoded: Picture) -> bytes:
    """Return a picture."""
    png, width, height = encoded
    image = Summary.Image(width=width, height=height, colorspace=_RGB, encoded_image_string=png)
    return _summary(step, tag=tag, image=image)


def hparams(step: int, group: str, values: Mapping[str, HparamValue], metrics: Sequence[str]) -> bytes:
    """Return the hyperparameters of a run and the tags of its metrics, for TensorBoard's plugin."""
    types = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    experiment = api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(name=name, type=types.get(type(value), api_pb2.DATA_TYPE_FLOAT64))
            for name, value in values.items()
        ],
        metric_infos=[
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=tag.rpartition("/")[2])
            for tag in metrics
        ],
    )
    start = hparams_pb(values, trial_id=group)
    return _hparams(step, hparams_metadata.EXPERIMENT_TAG, experiment=experiment) + _event(
        step, summary=start
    )


def session_end(step: int) -> bytes:
    """Return that the run is finished, for the plugin of hyperparameters."""
    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    return _hparams(step, hparams_metadata.SESSION_END_INFO_TAG, session_end_info=end)


def curves(title: str, *tags: str) -> Any:
    """Return a chart of the metrics whose tags match these regular expressions."""
    return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))


def band(title: str, tag: str, lower: str, upper: str) -> Any:
    """Return a chart of a metric between two others."""
    series = layout_pb2.MarginChartContent.Series(value=tag, lower=lower, upper=upper)
    return layout_pb2.Chart(title=title, margin=layout_pb2.MarginChartContent(series=[series]))


def layout(step: int, categories: Mapping[str, Sequence[Any]]) -> bytes:
    """Return the charts of the tab of custom scalars, by category."""
    found = [layout_pb2.Category(title=title, chart=charts) for title, charts in categories.items()]
    tensor = make_tensor_proto(layout_pb2.Layout(category=found).SerializeToString(), dtype=np.object_)
    metadata = layout_metadata.create_summary_metadata()
    return _summary(step, tag=layout_metadata.CONFIG_SUMMARY_TAG, tensor=tensor, metadata=metadata)


def _hparams(step: int, tag: str, **content: Any) -> bytes:
    metadata = hparams_metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**content))
    return _summary(step, tag=tag, tensor=hparams_metadata.NULL_TENSOR, metadata=metadata)


def _summary(step: int, **content: Any) -> bytes:
    return _event(step, summary=Summary(value=[Summary.Value(**content)]))


def _event(step: int, **content: Any) -> bytes:
    """Return an event as a record of its file."""
    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
    return record.getvalue()
