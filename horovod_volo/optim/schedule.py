"""Learning rate schedules: warm-up, a decay by name, then a constant, as a function of the step.

Invariant: the learning rate depends on the step and the settings alone, so checkpoints need no scheduler
state.
"""

import math
from collections.abc import Callable

from horovod_volo.config.update_settings import Update, milestones
from horovod_volo.core.names import Registry

# (fraction of the decay that has passed, from 0 to 1) -> fraction of the way from the floor to the peak
Decay = Callable[[float], float]

SCHEDULES: Registry[Decay] = Registry("schedule", "--sched")
register_schedule = SCHEDULES.register
register_schedule("cosine", lambda passed: 0.5 * (1 + math.cos(math.pi * passed)))
register_schedule("linear", lambda passed: 1 - passed)
register_schedule("constant", lambda passed: 1.0)  # noqa: ARG005


def _step(settings: Update) -> Decay:
    points, factor = milestones(settings), settings.decay_rate
    return lambda passed: factor ** sum(passed >= point for point in points)


def _poly(settings: Update) -> Decay:
    return lambda passed: (1 - passed) ** settings.poly_power


# Those with settings of their own; their names are registered with the default of these.
_WITH_SETTINGS: dict[str, Callable[[Update], Decay]] = {"step": _step, "poly": _poly}
for _name, _build in _WITH_SETTINGS.items():
    register_schedule(_name, _build(Update()))


def find_decay(settings: Update) -> Decay:
    """Return the decay that --sched names, with its settings; raise UserError if there is none."""
    build = _WITH_SETTINGS.get(settings.sched)
    return build(settings) if build else SCHEDULES.find(settings.sched)


def lr_at(
    step: int,
    *,
    decay: Decay,
    peak: float,
    start: float,
    floor: float,
    warmup: int,
    decay_steps: int,
    prefix: int = 0,
    stride: int = 1,
) -> float:
    """Return the learning rate: linear warm-up from `start`, `decay_steps` of decay, then `floor`.

    As published, the decay counts from the first step, so that after the warm-up it continues a little
    below `peak`; with a warm-up before the decay, of `prefix` steps, it counts from the end of that. The
    learning rate changes every `stride` steps; the published one changes at the start of each epoch.
    """
    step -= step % stride
    if step < warmup:
        return start + (peak - start) * step / warmup
    step -= prefix
    if step < decay_steps:
        return floor + (peak - floor) * decay(step / decay_steps)
    return floor
