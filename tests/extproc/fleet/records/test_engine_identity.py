"""What answers say about an engine, from recorded ones to arbitrary bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import (
    ANNOTATED,
    CONFIGURED,
    LEARNED,
    PYTHON,
    RUST,
    Engine,
    PromptArguments,
    Release,
)
from extproc.config.schema import WorkerEngine
from extproc.fleet.records.engine_identity import (
    MAX_ARGUMENT,
    UNASKED,
    EngineAnswer,
    EngineRecord,
    arguments_in,
    cache_tokens_in_info,
    caches_in_info,
    engine_of_metrics,
    identity_of,
    owner_in,
    release_in,
)

RECORDED = json.loads(Path("tests/wire/vllm_0.32.0_w1.jsonl").read_text().partition("\n")[0])
VLLM = Engine("vllm", Release(0, 32))
SGLANG = Engine("sglang", Release(0, 5, 23))
# The fields of SGLang 0.5.23's answer that are read here, and some that are not.
SERVER_INFO: dict[str, Any] = {
    "model_path": "/models/m",
    "chat_template": None,
    "hf_chat_template_name": None,
    "tool_call_parser": "qwen25",
    "reasoning_parser": "qwen3",
    "default_chat_template_kwargs": {"enable_thinking": False},
    "internal_states": [{"last_gen_throughput": 0.0}],
    "version": "0.5.23",
}
NONSENSE = [b"", b"[]", b"1", b"null", b"[" * 5000, b"\xff", b'{"version": 7}', b'{"data": [1]}']

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def cards(*owners: object) -> bytes:
    return encoded({"data": [{"id": "m", "owned_by": owner} for owner in owners]})


def test_recorded_answers_of_vllm_name_it_and_its_release() -> None:
    assert owner_in(encoded(RECORDED["models"])) == "vllm"
    assert release_in(encoded(RECORDED["version"])) == Release(0, 32)


@pytest.mark.parametrize(
    ("owners", "name"),
    [
        (("vllm", "vllm"), "vllm"),
        (("sglang",), "sglang"),
        (("tensorrt_llm",), "trtllm"),
        (("vllm", "sglang"), None),
        (("organization",), None),
        ((7,), None),
        ((), None),
    ],
)
def test_owner_of_models_is_their_engine(owners: tuple[object, ...], name: str | None) -> None:
    assert owner_in(cards(*owners)) == name


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        (b"# HELP vllm:x y\nvllm:num_requests_running{} 0\n", "vllm"),
        (b"sglang:num_running_reqs 0\n", "sglang"),
        (b"process_x 1\nsay_vllm:x 1\n", None),
        (b"vllm:x 1\nsglang:x 1\n", None),
        (b"", None),
    ],
)
def test_metrics_name_their_engine(metrics: bytes, name: str | None) -> None:
    assert engine_of_metrics(metrics) == name


@pytest.mark.parametrize("version", ["dev", "", "x" * 10_000])
def test_version_that_is_no_release_is_shown_shortened(version: str) -> None:
    why = release_in(encoded({"version": version}))
    assert isinstance(why, str)
    assert why.endswith("is no release")
    assert len(why) < 100


def test_arguments_of_sglang_are_read() -> None:
    assert arguments_in(encoded(SERVER_INFO)) == PromptArguments(
        tool_call_parser="qwen25",
        reasoning_parser="qwen3",
        default_chat_template_kwargs='{"enable_thinking":false}',
    )


@pytest.mark.parametrize("field", PromptArguments._fields)
@pytest.mark.parametrize("value", [7, ["x"], 1.5])
def test_arguments_of_a_wrong_type_are_unknown(field: str, value: object) -> None:
    assert arguments_in(encoded(SERVER_INFO | {field: value})) is None


def test_arguments_that_are_too_long_are_unknown() -> None:
    assert arguments_in(encoded({"chat_template": "x" * MAX_ARGUMENT})) is not None
    assert arguments_in(encoded({"chat_template": "x" * (MAX_ARGUMENT + 1)})) is None


@pytest.mark.parametrize("answer", NONSENSE)
def test_malformed_answers_name_nothing(answer: bytes) -> None:
    assert owner_in(answer) is None
    assert release_in(answer) == "its answer names no version"


@given(st.binary() | json_values.map(encoded))
def test_answer_of_any_kind_is_read_or_refused(answer: bytes) -> None:
    owner_in(answer)
    engine_of_metrics(answer)
    assert isinstance(release_in(answer), Release | str)
    arguments_in(answer)


def test_configured_engine_counts_more_than_what_the_worker_says() -> None:
    given = WorkerEngine("vllm", "0.32.0")
    assert identity_of(given, CONFIGURED, EngineAnswer()) == EngineRecord(
        VLLM, CONFIGURED, "", None
    )
    differs = identity_of(given, ANNOTATED, EngineAnswer(Engine("vllm", Release(0, 24)), ""))
    assert differs == EngineRecord(VLLM, ANNOTATED, "the worker says that it is vllm 0.24.0", None)


def test_answer_of_the_worker_counts_if_nothing_is_configured() -> None:
    arguments = PromptArguments("chatml")
    learned = identity_of(None, CONFIGURED, EngineAnswer(SGLANG, "", arguments))
    assert learned == EngineRecord(SGLANG, LEARNED, "", arguments)
    assert identity_of(None, CONFIGURED, EngineAnswer()) == EngineRecord(None, "", UNASKED, None)


def test_arguments_of_sglang_are_learned_although_it_is_configured() -> None:
    given, arguments = WorkerEngine("sglang", "0.5.23"), PromptArguments("chatml")
    assert (
        identity_of(given, CONFIGURED, EngineAnswer(SGLANG, "", arguments)).arguments == arguments
    )
    unknown = identity_of(given, CONFIGURED, EngineAnswer(reason="why"))
    assert (unknown.engine, unknown.reason) == (SGLANG, "its arguments are unknown: why")


def test_arguments_of_another_engine_do_not_count() -> None:
    given, told = (
        WorkerEngine("vllm", "0.32.0"),
        EngineAnswer(SGLANG, "", PromptArguments("chatml")),
    )
    assert identity_of(given, CONFIGURED, told).arguments is None


def test_known_engine_is_shown_with_its_source() -> None:
    assert EngineRecord(SGLANG, LEARNED, "", PromptArguments("chatml")).as_json() == {
        "engine": {
            "name": "sglang",
            "version": "0.5.23",
            "frontend": "python",
            "source": "learned",
        },
        "engine_reason": "",
        "engine_arguments": {
            "chat_template": "chatml",
            "hf_chat_template_name": None,
            "tool_call_parser": None,
            "reasoning_parser": None,
            "default_chat_template_kwargs": None,
            "enable_multimodal": None,
        },
    }
    assert EngineRecord(None, "", "why", None).as_json() == {
        "engine": None,
        "engine_reason": "why",
        "engine_arguments": None,
    }


@pytest.mark.parametrize(
    ("given", "told", "front_end"),
    [
        (WorkerEngine("vllm", "0.33.0"), VLLM._replace(front_end=RUST), RUST),
        (WorkerEngine("vllm", "0.33.0"), None, PYTHON),
        (WorkerEngine("vllm", "0.33.0"), SGLANG._replace(front_end=RUST), PYTHON),
        (WorkerEngine("vllm", "0.33.0", PYTHON), VLLM._replace(front_end=RUST), PYTHON),
        (WorkerEngine("vllm", "0.33.0", RUST), VLLM, RUST),
    ],
)
def test_front_end_is_the_worker_s_own_word_unless_it_is_configured(
    given: WorkerEngine, told: Engine | None, front_end: str
) -> None:
    found = identity_of(given, CONFIGURED, EngineAnswer(told, ""))
    assert found.engine == Engine("vllm", Release(0, 33), front_end)


def test_engine_of_a_wrong_release_stays_unknown() -> None:
    assert identity_of(WorkerEngine("vllm", "x"), CONFIGURED, EngineAnswer()).engine is None


def test_sglang_says_whether_prefixes_are_cached() -> None:
    assert caches_in_info(encoded({**SERVER_INFO, "disable_radix_cache": True})) is False
    assert caches_in_info(encoded({**SERVER_INFO, "disable_radix_cache": False})) is True
    assert caches_in_info(encoded(SERVER_INFO)) is None


def test_sglang_says_how_large_the_cache_of_each_rank_is() -> None:
    sized = {**SERVER_INFO, "max_total_num_tokens": 40_000}
    assert cache_tokens_in_info(encoded(sized)) == 40_000
    assert cache_tokens_in_info(encoded({**sized, "dp_size": 4})) == 160_000
    assert cache_tokens_in_info(encoded(SERVER_INFO)) is None
    assert cache_tokens_in_info(encoded({**sized, "max_total_num_tokens": -1})) is None


@pytest.mark.parametrize("answer", NONSENSE)
def test_nonsense_says_nothing_of_the_cache(answer: bytes) -> None:
    assert caches_in_info(answer) is None
    assert cache_tokens_in_info(answer) is None
