"""What a feature does that has none of the hooks."""

from extproc.features.feature import Feature
from extproc.observing.outcomes import Account
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from tests.extproc.routing.books import QUERY, WORKERS, decided, ledger


def test_feature_without_hooks_changes_nothing() -> None:
    feature, made = Feature(), decided(ledger())
    snapshot = Snapshot(WORKERS, [{}], lambda *_: Load(), "cost", 0)
    assert feature.terms(PLAIN_REQUEST, QUERY, snapshot, 0.0) == ()
    assert feature.dress(made) is made
    feature.begin(made, QUERY, 0.0)
    feature.note_outcome(Account(made, None, 0.0).outcome(), 0.0)
    assert feature.collectors() == ()
