from collections.abc import Callable

import pytest

from extproc.base.errors import Http2Error
from extproc.http2.frames import ErrorCode
from extproc.http2.limits import Limits
from extproc.http2.streams import Floods

LIMITS = Limits(
    pings_a_tick=3,
    settings_a_tick=3,
    idle_frames_a_tick=3,
    idle_frames_a_stream=2,
    rapid_resets_a_tick=3,
    faults_a_tick=3,
)

EACH: list[Callable[[Floods], None]] = [
    Floods.ping,
    Floods.settings,
    Floods.idle_frame,
    Floods.rapid_reset,
    Floods.fault,
]


@pytest.mark.parametrize("count", EACH)
def test_count_beyond_its_limit_ends_the_connection(count: Callable[[Floods], None]) -> None:
    floods = Floods(LIMITS)
    for _ in range(3):
        count(floods)
    with pytest.raises(Http2Error, match="too many") as caught:
        count(floods)
    assert caught.value.code == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("count", EACH)
def test_tick_resets_the_counts(count: Callable[[Floods], None]) -> None:
    floods = Floods(LIMITS)
    for _ in range(5):
        for _ in range(3):
            count(floods)
        floods.tick()


def test_stream_opened_allows_further_idle_frames() -> None:
    floods = Floods(LIMITS)
    floods.stream_opened()
    for _ in range(5):
        floods.idle_frame()
    with pytest.raises(Http2Error):
        floods.idle_frame()
