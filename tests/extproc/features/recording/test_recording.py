"""The recorder as a feature: whose requests they are, and which of them are written."""

import pytest

from extproc.config.sections import RecorderSettings
from extproc.features.recording.recorder import Recorder
from extproc.features.recording.recording import Recording
from extproc.requests.request import PLAIN_REQUEST
from extproc.requests.tenant_salt import Tenant
from extproc.routing.inputs.query import Query
from tests.extproc.admin.decisions import decided, prompt

RULES = RecorderSettings(tenant_header="X-Team")


def recording(*, are_salted: bool = False) -> tuple[Recorder, Recording]:
    recorder = Recorder(RULES, "nowhere", bytes(32), max_open=1)  # its thread is not started
    return recorder, Recording(recorder, RULES, are_salted=are_salted)


@pytest.mark.parametrize(
    ("values", "name"), [([b"a"], b"a"), ([b"a", b"a"], b"a"), ([b"a", b"b"], b""), ([], b"")]
)
def test_recorded_request_has_the_one_tenant_that_its_header_names(
    values: list[bytes], name: bytes
) -> None:
    _, one = recording()
    assert one.describe(PLAIN_REQUEST, {"x-team": values}).tenant == Tenant(name)


def test_tenants_that_have_salts_are_not_read_again() -> None:
    _, one = recording(are_salted=True)
    assert one.headers == ()
    assert one.describe(PLAIN_REQUEST, {"x-team": [b"a"]}) is PLAIN_REQUEST


@pytest.mark.parametrize("is_sent", [True, False])
def test_request_that_was_not_placed_counts_as_failed(*, is_sent: bool) -> None:
    recorder, one = recording()
    made = decided()
    one.begin(PLAIN_REQUEST, Query("m", [prompt(range(32))]), made, 0.0)
    one.note_end(made, None, is_booked=True, is_sent=is_sent)
    assert recorder.not_recorded["failed"] == (not is_sent)
    (collector,) = one.collectors()
    assert next(iter(collector.collect())).name == "kvsteer_recorded"
