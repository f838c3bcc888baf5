import pytest

from extproc.media.averages import LEAST_TOKENS, MOST_TOKENS, Averages
from extproc.media.knowledge import MediaKnowledge
from extproc.requests.media import USUAL_TOKENS


def test_average_is_the_usual_one_until_an_engine_reports() -> None:
    averages = Averages()
    averages.note("tiny", {"image": 2}, 500)
    assert averages.tokens_of("tiny", "image") == 250
    assert averages.tokens_of("tiny", "audio") == USUAL_TOKENS
    assert averages.tokens_of("other", "image") == averages.tokens_of(None, "image") == USUAL_TOKENS


def test_average_ignores_requests_with_several_kinds() -> None:
    averages = Averages()
    averages.note("tiny", {"image": 1, "audio": 1}, 500)
    assert averages.tokens_of("tiny", "image") == USUAL_TOKENS


def test_average_follows_what_changes() -> None:
    averages = Averages()
    for tokens in [100.0] * 100 + [900.0] * 100:
        averages.note("tiny", {"image": 1}, tokens)
    assert 880 < averages.tokens_of("tiny", "image") <= 900


@pytest.mark.parametrize(("tokens", "average"), [(1, LEAST_TOKENS), (1e9, MOST_TOKENS)])
def test_average_is_bounded(tokens: float, average: float) -> None:
    averages = Averages()
    averages.note("tiny", {"image": 1}, tokens)
    assert averages.tokens_of("tiny", "image") == average


@pytest.mark.parametrize(
    ("media_tokens", "others", "average"),
    [(300, 800.0, 150), (None, 800.0, 400), (None, None, USUAL_TOKENS), (0, 9.0, USUAL_TOKENS)],
)
def test_usage_prefers_what_the_engine_says_of_media(
    media_tokens: int | None, others: float | None, average: float
) -> None:
    knowledge = MediaKnowledge(b"key")
    knowledge.note_usage("tiny", ["image", "image"], media_tokens, others)
    assert knowledge.averages.tokens_of("tiny", "image") == average
