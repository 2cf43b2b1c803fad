"""A sign of life from a long stage of a run's set-up, such as listing a million images.

The layers that do such work do not know the watchdog, which puts its own function here.
"""

from collections.abc import Callable

note_progress: Callable[[], object] = object  # does nothing: this process has no watchdog
