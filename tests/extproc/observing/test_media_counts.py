from extproc.observing.media_counts import shares_of, shown
from extproc.observing.recent_counts import MINUTE_SECONDS, RECENT_MINUTES, RecentCounts
from extproc.routing.inputs.query import Media, MediaItem


def items(*known: bool, kind: str = "image") -> list[MediaItem]:
    return [MediaItem(kind, one, True, 9.0) for one in known]


def test_items_are_keyed_up_to_the_first_unknown_one() -> None:
    media = Media([*items(True, True), *items(False, True, kind="video")], 9.0, False, 9)
    assert shares_of(media) == {("image", True): 2, ("video", False): 2}


def test_recent_shares_are_shown_by_kind_and_forgotten() -> None:
    recent = RecentCounts[tuple[str, bool]]()
    recent.add({("image", True): 2, ("image", False): 1}, 1.0)
    recent.add({("audio", False): 1}, 2.0)
    assert shown(recent, 3.0) == [
        {"kind": "audio", "items": 1, "keyed": 0},
        {"kind": "image", "items": 3, "keyed": 2},
    ]
    assert shown(recent, 3.0 + MINUTE_SECONDS * RECENT_MINUTES) == []
