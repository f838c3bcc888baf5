from extproc.features.feature import NOTHING_WRITTEN, Written
from extproc.routing.candidates.pins import Pin, PinnedRank
from extproc.serving.named_rank import named_rank

FIELD = PinnedRank(1, Pin("routed_dp_rank", in_body=True), "/generate")


def test_named_rank_is_a_header_or_a_field_of_the_body() -> None:
    header = PinnedRank(3, Pin("x-rank"), "/v1/completions")
    assert named_rank(header, b"{}") == Written((("x-rank", "3"),))
    assert named_rank(FIELD, b'{"text":"a"}') == Written((), b'{"text":"a","routed_dp_rank":1}')


def test_named_rank_changes_no_body_that_must_stay() -> None:
    assert named_rank(None, b"{}") == NOTHING_WRITTEN
    assert named_rank(FIELD, None) == NOTHING_WRITTEN
