"""Clocks of machines that may be wrong about the time."""

from broker.simulate.timeline import Timeline


class MachineClock:
    """The clocks of one machine (broker.suspend_tolerant_clock.Clock), both of which a fault may move."""

    def __init__(self, timeline: Timeline, *, monotonic_ahead_s: float = 0.0, wall_ahead_s: float = 0.0) -> None:
        self.timeline, self.monotonic_ahead_s, self.wall_ahead_s = timeline, monotonic_ahead_s, wall_ahead_s

    def monotonic(self) -> float:
        """Seconds since some moment of this machine."""
        return self.timeline.now + self.monotonic_ahead_s

    def time(self) -> float:
        """What this machine believes to be the time of day."""
        return self.timeline.now + self.wall_ahead_s
