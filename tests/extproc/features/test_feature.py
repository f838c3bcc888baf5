"""What a feature does that has none of the hooks."""

from extproc.features.feature import NOTHING_WRITTEN, Feature
from extproc.requests.request import PLAIN_REQUEST
from extproc.requests.trusted_headers import NO_TRUSTED_HEADERS
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from tests.extproc.routing.books import QUERY, WORKERS, decided, ledger


def test_feature_without_hooks_changes_nothing() -> None:
    feature, made = Feature(), decided(ledger())
    snapshot = Snapshot(WORKERS, [{}], lambda *_: Load(), "cost", 0)
    assert feature.terms(PLAIN_REQUEST, QUERY, snapshot, 0.0) == ()
    assert feature.dress(made, PLAIN_REQUEST, QUERY) is made
    assert feature.must_wait(PLAIN_REQUEST, made, 0.0) is None
    assert feature.describe(PLAIN_REQUEST, NO_TRUSTED_HEADERS) is PLAIN_REQUEST
    assert feature.extend(made, "/") == b""
    assert feature.write(made, "/", b"{}") == NOTHING_WRITTEN
    feature.begin(PLAIN_REQUEST, QUERY, made, 0.0)
    feature.note_placed(made, made.verdict, is_booked=True)
    feature.note_server(made, "a:1")
    assert feature.respond(made) == ()
    feature.note_end(made, None, is_booked=True, is_sent=True)
    assert feature.collectors() == ()
