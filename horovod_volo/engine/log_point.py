"""What is logged every --log-every steps: losses, speed, shares of time, memory, the spread over ranks."""

import gc
from collections.abc import Sequence
from statistics import median_low
from typing import Any

from horovod_volo.cluster.watchdog import learned_limit
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.engine.checkpoint.saving import finish_checkpoint
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.divergence import go_back
from horovod_volo.engine.image_size import has_full_side
from horovod_volo.engine.model_cost import PASSES
from horovod_volo.monitor.logger import Values
from horovod_volo.monitor.meters import OwnTime, device_memory_gib, host_memory_gib

_DIGITS = 6  # of fractions and hours

RankReport = dict[str, Any]  # what one rank has measured since the last log point


def log_point(context: TrainContext) -> None:
    """Log losses and speed since the last log point. Collective: every rank calls this."""
    meter, world, step = context.progress.meter, context.world, context.state.step
    steps = meter.micro_batches / len(context.micro_batches)
    names = meter.sums().keys()
    trained = context.progress.skipped.count(round(steps)) < round(steps)
    reports: list[RankReport] = world.allgather_object(_report(context, steps))
    if any(report["failed"] for report in reports):
        finish_checkpoint(context)
    log_bad_samples(context, context.learner.train_loader.bad_samples)
    losses = [sum(values) for values in zip(*(report["sums"] for report in reports), strict=True)]
    finite = losses[-1]  # micro-batches
    if context.progress.skipped.overflowing or not (finite or context.state.reducer.statistics.looks):
        go_back(context, step)
        context.progress.awaits_log_point = True
    elif context.progress.awaits_log_point and finite and trained:
        context.progress.futile_returns, context.progress.awaits_log_point = 0, False
    means = {name: value / max(finite, 1) for name, value in zip(names, losses, strict=True)}
    values: Values = {
        "epoch": round(step / context.derived.steps_per_epoch, 4),
        "images_seen": step * context.derived.global_batch,
        "loss": means.pop("total"),
        **{name: mean for name, mean in means.items() if name != "finite"},
        "lr": context.lr(step - 1),
        **_speed(context, reports, steps),
        "host_memory_gib": round(max(report["host_memory"] for report in reports), 3),
    }
    now, most = (max(report["device_memory"][kind] for report in reports) for kind in (0, 1))
    if most:
        values |= {"device_memory_gib": round(most, 3), "device_allocated_gib": round(now, 3)}
    norm = context.progress.logged_norm  # none at an epoch's end between log points
    context.progress.logged_norm = None
    if norm is not None and norm.isfinite():
        values["gradient_norm"] = float(norm)
    own_times = [report["own"] for report in reports]
    if world.size > 1:
        own_seconds = [own.seconds for own in own_times]
        values |= {
            "step_seconds_min": min(own_seconds),
            "step_seconds_median": median_low(own_seconds),
            "step_seconds_max": max(own_seconds),
            "slowest_rank": own_seconds.index(max(own_seconds)),
        }
    if finite:
        context.logger.log_training(step, values)
        context.callbacks.logged(context, values)
    if context.progress.stragglers is not None:
        log_own_times(context, own_times)
    if not context.config.run.hang_timeout:
        mean_seconds = sum(report["seconds"] for report in reports) / world.size
        context.heartbeat.watch(learned_limit(mean_seconds / steps))
    context.callbacks.flush(context)
    gc.collect()  # on all ranks at once: they have just synchronised in allgather_object
    meter.reset()
    context.progress.timer.reset()


def _report(context: TrainContext, steps: float) -> RankReport:
    """Return what this rank has measured since the last log point."""
    meter, timer = context.progress.meter, context.progress.timer
    sums = list(meter.sums().values())  # waits for the device
    saved, outside = context.progress.clock.take_checkpoint_seconds()
    return {
        "sums": sums,  # of losses
        "seconds": meter.seconds,  # of training
        "waited": meter.data_wait_seconds,  # of them, for data
        "exchanged": timer.exchange_seconds() if context.world.size > 1 else 0.0,  # of them, for other ranks
        "saved": saved,  # for checkpoints
        "outside": outside,  # of these, those that are not among the seconds of training
        "bad_samples": context.learner.train_loader.bad_samples.skipped,
        "failed": context.checkpoints.failed,  # whether a checkpoint could not be written
        "own": OwnTime(timer.seconds_per_step(), meter.data_wait_seconds / steps),
        "hours": context.progress.clock.hours,
        "host_memory": host_memory_gib(),
        "device_memory": device_memory_gib(context.resources.device),  # now, and at most
    }


def _speed(context: TrainContext, reports: Sequence[RankReport], steps: float) -> Values:
    """Return images per second, what part of wall time was spent on what, and what was skipped."""

    def total(name: str) -> float:
        return float(sum(report[name] for report in reports))

    seconds = total("seconds")
    images_per_second = steps * context.derived.global_batch * len(reports) / seconds
    wall = seconds + total("outside")
    data, exchange, checkpoint = (total(name) / wall for name in ("waited", "exchanged", "saved"))
    values: Values = {
        "images_per_second": images_per_second,
        "data_wait": total("waited") / seconds,
        "bad_samples": int(total("bad_samples")),
        "skipped_steps": context.progress.skipped.total,
        "hours": round(reports[0]["hours"], _DIGITS),
        "time_data": round(data, _DIGITS),
        # On a GPU, the host may wait for data while the device still exchanges.
        "time_compute": round(max(0.0, 1 - data - exchange - checkpoint), _DIGITS),
        "time_exchange": round(exchange, _DIGITS),
        "time_checkpoint": round(checkpoint, _DIGITS),
    }
    if context.state.scaler.is_enabled():
        values["loss_scale"] = context.state.scaler.get_scale()
    # The cost is that of images of --img-size; those since the last log point may have been smaller.
    begun, all_steps = context.step - context.config.run.log_every, context.total_steps
    if context.cost.forward_flops and has_full_side(context.config.model, begun, all_steps):
        flops = PASSES * context.cost.forward_flops * images_per_second
        values["model_tflops"] = flops / len(reports) / 1e12
        if context.peak_flops:
            values["mfu"] = round(flops / context.peak_flops, _DIGITS)
    return values


def log_own_times(context: TrainContext, times: Sequence[OwnTime]) -> None:
    """Log the time of each rank's own part of a step, and name a rank that the others wait for."""
    assert context.progress.stragglers is not None
    step, hosts = context.state.step, context.progress.stragglers.hosts
    values = {
        f"rank {name}/{rank:03}_{host}": value
        for rank, (own, host) in enumerate(zip(times, hosts, strict=True))
        for name, value in own._asdict().items()
    }
    context.logger.log_ranks(step, values)
    if message := context.progress.stragglers.find(times):
        context.logger.log(message)


def log_bad_samples(context: TrainContext, tracker: BadSampleTracker) -> None:
    """Log the samples that any rank has skipped since the last call. Collective: every rank calls this."""
    skipped = tracker.new_messages()
    (on_all_ranks,) = context.world.sum_over_ranks(len(skipped))
    if not on_all_ranks:
        return
    for messages in context.world.allgather_object(skipped):
        for message in messages:
            # Another rank may have read, and logged, this sample in an earlier epoch.
            if message not in context.progress.logged_bad_samples:
                context.progress.logged_bad_samples.add(message)
                context.logger.log(f"left out: {message}")
