"""How often workers are asked what the configuration does not say."""

from dataclasses import dataclass

from extproc.fleet.asking.polling import TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True)
class AskingTimes:
    """The waits between questions to a worker, and between look-ups of its name.

    feed_soon_seconds, feed_seldom_seconds: when a worker is asked again where its feed is: soon
    while the feed is not working, since a worker that restarted may publish elsewhere, and rarely
    while all is well. model_retry_seconds: the first and the longest wait before a worker without
    an answer is asked again what it serves (30 s with jitter). resolve_seconds: between look-ups.
    first_resolve_seconds: how long the start waits for the first ones.

    engine_again_seconds: when a worker is asked again which engine it runs. engine_retry_seconds:
    the first and the longest pause while it is unknown. engine_least_seconds: the shortest time
    between two questions, however often the worker loses its cache.

    tokens_again_seconds, tokens_different_seconds: when a worker is asked again for the tokens of
    golden requests: after an answer, and after different tokens. Asking one takes about 7 ms of
    CPU; so the first questions are spread over tokens_first_spread_seconds for each worker of the
    fleet, and later pauses take at least tokens_again_spread_seconds, or
    tokens_different_spread_seconds, for each. tokens_retry_seconds, tokens_least_seconds: as of the
    engine. tokens_answer_seconds: the most time for one answer. tokens_unknown_seconds: the pause
    while a worker's model is unknown.
    """

    feed_soon_seconds: float = 5.0
    feed_seldom_seconds: float = 60.0
    model_retry_seconds: tuple[float, float] = (1.0, 20.0)
    resolve_seconds: float = 5.0
    first_resolve_seconds: float = 2.0
    engine_again_seconds: float = 300.0
    engine_retry_seconds: tuple[float, float] = (1.0, 30.0)
    engine_least_seconds: float = 1.0
    tokens_again_seconds: float = 300.0
    tokens_different_seconds: float = 10.0
    tokens_first_spread_seconds: float = 0.02
    tokens_again_spread_seconds: float = 0.7
    tokens_different_spread_seconds: float = 0.15
    tokens_retry_seconds: tuple[float, float] = (1.0, 30.0)
    tokens_least_seconds: float = 2.0
    tokens_answer_seconds: float = TIMEOUT_SECONDS
    tokens_unknown_seconds: float = 1.0


USUAL = AskingTimes()
