"""How often workers are asked what the configuration does not say."""

from dataclasses import dataclass

from extproc.fleet.asking.polling import TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True)
class AskingTimes:
    """The waits between questions to a worker, and between look-ups of its name."""

    # When a worker is asked again where its feed is: soon while the feed is not working, since a
    # worker that restarted may publish elsewhere, and rarely while all is well.
    feed_soon_seconds: float = 5.0
    feed_seldom_seconds: float = 60.0
    # The first and the longest wait before a worker without an answer is asked again what it serves
    # (30 s with jitter).
    model_retry_seconds: tuple[float, float] = (1.0, 20.0)
    # Between look-ups of host names, and how long the start waits for the first ones.
    resolve_seconds: float = 5.0
    first_resolve_seconds: float = 2.0
    # When a worker is asked again which engine it runs.
    engine_again_seconds: float = 300.0
    # The first and the longest pause while the engine is unknown.
    engine_retry_seconds: tuple[float, float] = (1.0, 30.0)
    # The shortest time between two such questions, however often the worker loses its cache.
    engine_least_seconds: float = 1.0
    # When a worker is asked again for the tokens of golden requests: after an answer, and after
    # different tokens.
    tokens_again_seconds: float = 300.0
    tokens_different_seconds: float = 10.0
    # Asking one for them takes about 7 ms of CPU. So the first questions are spread over so much
    # time for each worker of the fleet, and later pauses take at least so much for each.
    tokens_first_spread_seconds: float = 0.02
    tokens_again_spread_seconds: float = 0.7
    tokens_different_spread_seconds: float = 0.15
    # As of the engine.
    tokens_retry_seconds: tuple[float, float] = (1.0, 30.0)
    tokens_least_seconds: float = 2.0
    # The most time for one answer.
    tokens_answer_seconds: float = TIMEOUT_SECONDS
    # The pause while a worker's model is unknown.
    tokens_unknown_seconds: float = 1.0


USUAL = AskingTimes()
