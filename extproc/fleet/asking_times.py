"""How often workers are asked what the configuration does not say."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AskingTimes:
    """The waits between questions to a worker, and between look-ups of its name.

    feed_soon_seconds, feed_seldom_seconds: when a worker is asked again where its feed is: soon
    while the feed is not working, since a worker that restarted may publish elsewhere, and rarely
    while all is well. model_retry_seconds: the first and the longest wait before a worker without
    an answer is asked again what it serves (30 s with jitter). resolve_seconds: between look-ups.
    first_resolve_seconds: how long the start waits for the first ones.
    """

    feed_soon_seconds: float = 5.0
    feed_seldom_seconds: float = 60.0
    model_retry_seconds: tuple[float, float] = (1.0, 20.0)
    resolve_seconds: float = 5.0
    first_resolve_seconds: float = 2.0


USUAL = AskingTimes()
