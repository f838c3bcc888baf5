"""Token ids that go with requests: what the feature does with a decision."""

import logging
from array import array

import pytest
from msgspec.structs import replace

from extproc.config.reader import parse
from extproc.features.handing.handing import HandTokens
from extproc.features.handing.id_fields import PATHS
from extproc.fleet.workers import Workers
from extproc.observing.outcomes import Outcome
from extproc.observing.usage import Usage
from extproc.proof.samples import FEWER, HANDED, SAMPLE, Samples
from extproc.requests.prompt import ALL_FORMS, CONVERSATION
from extproc.requests.request import CHAT_PATH, PLAIN_REQUEST, Head
from extproc.routing.decision import Decision, PullSource
from extproc.routing.handing import FEW, NOT_LIVE, UNPROVED, Handing
from extproc.routing.inputs.query import Query
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Prompt
from tests.extproc.admin.decisions import decided
from tests.extproc.serving.routers import of

ENGINE = "engine: {name: %s, version: '%s'}"
CONFIG = "models: [{name: m}]\nworkers: [{endpoint: 'a:1', %s}, {endpoint: 'b:1', %s}]\n"
VLLM, SGLANG = ENGINE % ("vllm", "0.33.0"), ENGINE % ("sglang", "0.5.23")
PROMPT = Prompt("m", array("I", range(5000)))
REQUEST = replace(PLAIN_REQUEST, head=Head("POST", CHAT_PATH, None), body=b"{}", reason="")
COUNTED = Outcome("m", "a:1", False, 200, 0.1, 5000, 0, Usage(5001, 0, "prompt", 1), True)


def before(first: str, second: str) -> HandTokens:
    """The feature before two workers of these engines."""
    config = parse(CONFIG % (first, second), "c")
    workers = Workers(config, FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    return HandTokens(config.policy.hand_tokens, workers, writes_legs=True)


@pytest.fixture
def feature() -> HandTokens:
    return before(VLLM, VLLM)


def with_ids(samples: Samples, outcome: str = HANDED) -> Decision:
    tokens = PROMPT.tokens if outcome == HANDED else None
    ids = Handing(outcome, tokens, (CHAT_PATH,), samples, samples.start, len(PROMPT.tokens))
    return replace(decided(), handing=ids)


def test_ids_stay_here_until_all_workers_have_proved_them(feature: HandTokens) -> None:
    query = Query("m", [PROMPT], forms=2)
    made = feature.dress(decided(), REQUEST, query).handing
    assert made is not None
    assert (made.outcome, made.worker) == (UNPROVED, "a:1")
    few = replace(query, prompts=[Prompt("m", array("I", [1]))])
    dressed = feature.dress(decided(), REQUEST, few).handing
    assert dressed is not None
    assert dressed.outcome == FEW


def test_decision_that_goes_nowhere_is_left_as_it_is(feature: HandTokens) -> None:
    made = replace(decided(), pick=())
    assert feature.dress(made, REQUEST, Query("m", [PROMPT], forms=2)) is made


def test_ids_are_written_where_no_other_worker_has_a_part(feature: HandTokens) -> None:
    made = with_ids(Samples())
    assert feature.extend(made, CHAT_PATH).startswith(
        b'"kv_transfer_params":{"prompt_token_ids":[0'
    )
    assert feature.extend(decided(), CHAT_PATH) == b""
    pulls = replace(made, source=PullSource("b:1", 1, 64))
    assert feature.extend(pulls, CHAT_PATH) == b""
    assert feature.extend(pulls, "/v1/completions").startswith(b'"prompt":[0')


def test_sglang_gets_ids_in_a_field_of_its_own() -> None:
    made = with_ids(Samples())
    assert before(SGLANG, SGLANG).extend(made, CHAT_PATH).startswith(b'"input_ids":[0')
    assert before(SGLANG, SGLANG).extend(made, "/v1/messages") == b""


@pytest.mark.parametrize("path", sorted(PATHS))
def test_engines_of_two_kinds_get_no_ids(path: str) -> None:
    feature = before(SGLANG, VLLM)
    for record in feature._workers.records.values():
        record.proof.restore(ALL_FORMS, 0.0)
    request = replace(REQUEST, head=Head("POST", path, None))
    made = feature.dress(decided(), request, Query("m", [PROMPT], forms=2)).handing
    assert made is not None
    assert made.outcome == (NOT_LIVE if path == "/v1/completions" else UNPROVED)


def test_request_that_is_over_keeps_no_ids(feature: HandTokens) -> None:
    made = with_ids(Samples())
    feature.note_end(made, None, is_booked=True, is_sent=False)
    assert made.handing is not None
    assert (made.handing.tokens, made.handing.is_handed) == (None, True)
    feature.note_end(decided(), None, is_booked=True, is_sent=True)


@pytest.mark.parametrize("outcome", [HANDED, SAMPLE])
def test_count_that_disagrees_is_logged_once(
    feature: HandTokens, caplog: pytest.LogCaptureFixture, outcome: str
) -> None:
    samples = Samples()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = with_ids(samples, outcome)
            feature.note_end(made, COUNTED, is_booked=True, is_sent=True)
    assert samples.refuted == "its engine counted 5001 tokens in a prompt of 5000"
    assert caplog.text.count("token ids no longer go with requests") == 1


def test_sample_that_finds_fewer_blocks_proves_nothing_until_golden_requests_agree(
    feature: HandTokens,
) -> None:
    record = feature._workers.records["b:1"]
    record.proof.restore(ALL_FORMS, 0.0)
    made, samples = with_ids(record.proof.samples, SAMPLE), record.proof.samples
    missed = COUNTED._replace(reported=Usage(5000, 0, "prompt", 1), predicted_tokens=4096)
    starts = [samples.start]
    for _ in range(2):  # the second one was sent before the first one was noticed
        feature.note_end(made, missed, is_booked=True, is_sent=True)
        starts.append(samples.start)
    assert starts[0] < starts[1] == starts[2]
    assert samples.refuted == ""
    assert not record.proof.is_proved(CONVERSATION)
    assert samples.results == {FEWER: 1}


def test_feature_is_made_only_if_it_is_enabled() -> None:
    enabled = "accounting: {responses: usage}\npolicy: {hand_tokens: {enabled: true}}"
    given = CONFIG % (VLLM, VLLM)
    for text, count in ((given, 0), (given + enabled, 1)):
        one = of(text)
        assert len(one.hooks.extend) == count
        one.router.close()
