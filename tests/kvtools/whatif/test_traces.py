import json
from array import array
from typing import Any

import pytest

from extproc.base.errors import RequestError
from kvstate.overlap import Tokens
from kvtools.whatif.engines import Request
from kvtools.whatif.outlook import measured_of
from kvtools.whatif.traces import (
    PROXY,
    RecordedRequest,
    Replay,
    Trace,
    block_tokens_of,
    requests_of,
)


def read(*lines: Any, **options: Any) -> list[RecordedRequest]:
    trace = Trace(**options)
    trace.read("trace.jsonl", [json.dumps(line).encode() for line in lines])
    return trace.requests


def played(*lines: Any, size: int = 16, **options: Any) -> list[Request]:
    return requests_of(read(*lines), Replay(size, **options))


def shared(one: Request, other: Request) -> int:
    pairs = zip(one.blocks, other.blocks, strict=False)
    return next(
        (n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.blocks), len(other.blocks))
    )


def mooncake(at: int, tokens: int, ids: list[int], **rest: Any) -> dict[str, Any]:
    return {"timestamp": at, "input_length": tokens, "output_length": 9, "hash_ids": ids, **rest}


def test_requests_begin_at_0_in_order_of_time() -> None:
    found = read(mooncake(7_000, 5, [1]), mooncake(5_000, 6, [2]))
    assert [(one.at, one.tokens) for one in found] == [(0.0, 6), (2.0, 5)]


def test_files_of_several_processes_are_aligned_by_their_beginning() -> None:
    found = read(mooncake(0, 5, [1], began=1_003.5), mooncake(500, 6, [2], began=1_000.0))
    assert [(one.at, one.tokens) for one in found] == [(0.0, 6), (3.0, 5)]


@pytest.mark.parametrize(
    "line",
    [
        {"time": "2026-01-01T00:00:02Z", "prompt_tokens": 40, "completion_tokens": 7},
        {"time": 1767225602, "usage": {"prompt_tokens": 40, "completion_tokens": 7}},
        {"time": 1.5, "input_tokens": 40, "output_tokens": 7, "host": "a", "status": 200},
        {"time": 1.5, "usage": {"input_tokens": 40, "output_tokens": 7}, "hash_ids": None},
    ],
)
def test_access_log_of_token_counts_is_read(line: dict[str, Any]) -> None:
    (one,) = read(line)
    assert (one.tokens, one.answer_tokens, one.hashes) == (40, 7, None)


def test_lines_without_sharing_share_no_blocks() -> None:
    line = {"time": 1, "prompt_tokens": 40}
    one, other = played(line, line)
    assert len(one.blocks) == 3
    assert not {*one.blocks, *one.answer_blocks} & {*other.blocks, *other.answer_blocks}


@pytest.mark.parametrize("name", ["session", "session_id", "conversation_id"])
def test_prompt_of_a_session_begins_with_the_one_before(name: str) -> None:
    counts = [(32, 16), (64, 16), (16, 1)]
    first, second, third = played(
        *({"time": at, "prompt_tokens": prompt, "completion_tokens": answer, name: "s"}
          for at, (prompt, answer) in enumerate(counts))
    )  # fmt: skip
    assert second.blocks[:3] == [*first.blocks, *first.answer_blocks]
    assert (shared(first, second), shared(second, third)) == (2, 1)


def test_hash_blocks_are_split_and_joined() -> None:
    lines = [mooncake(0, 160, [7, 8, 9], block_size=64), mooncake(1, 128, [7, 8], block_size=64)]
    for size, blocks, common in ((16, 10, 8), (64, 3, 2), (128, 2, 1)):
        one, other = played(*lines, size=size)
        assert (len(one.blocks), shared(one, other)) == (blocks, common)
    with pytest.raises(ValueError, match="blocks of 64 tokens cannot be played in blocks of 48"):
        played(*lines, size=48)


def test_prompt_with_too_few_hashes_ends_with_its_own_blocks() -> None:
    one, other = played(*[mooncake(0, 100, [7], block_size=16)] * 2)
    assert (len(one.blocks), shared(one, other)) == (7, 1)


def test_block_tokens_of_is_the_size_of_the_hashes_or_a_part_of_it() -> None:
    large, small = mooncake(0, 1, [1]), mooncake(0, 1, [1], block_size=48)
    assert block_tokens_of(read(large), 16, 128) == 128
    assert block_tokens_of(read(large, small), 16, 128) == 16
    assert block_tokens_of(read({"time": 0, "prompt_tokens": 9}), 16, 128) == 16


def test_answer_is_part_of_the_prompt_that_continues_it() -> None:
    lines = [
        mooncake(0, 40, [1, 2, 3], block_size=16, output_length=24),
        mooncake(9, 80, [1, 2, 4, 5, 6], block_size=16),
    ]
    first, second = played(*lines)
    assert list(first.answer_blocks) == list(second.blocks[2:4])
    first, second = played(*lines, continues=False)
    assert not {*first.answer_blocks} & {*second.blocks}
    # a shorter prompt cannot contain the answer
    lines[1] = mooncake(9, 60, [1, 2, 4, 5], block_size=16)
    first, second = played(*lines)
    assert not {*first.answer_blocks} & {*second.blocks}


def test_answer_of_unknown_length_has_the_configured_one() -> None:
    (one,) = played({"time": 0, "prompt_tokens": 4}, answer_tokens=33, speedup=2.0)
    assert (one.answer_tokens, len(one.answer_blocks)) == (33, 3)


def letters(path: str, body: bytes) -> Tokens:
    if path != "/v1/chat/completions":
        raise RequestError(path)
    return array("I", map(ord, json.loads(body)["messages"][0]["content"]))


def test_requests_with_bodies_share_blocks_by_their_tokens() -> None:
    def chat(text: str) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "user", "content": text}]}

    found = read(
        {"timestamp": 0, "path": "/v1/chat/completions", "body": chat("a" * 40)},
        {"timestamp": 1, "url": "/v1/chat/completions", "body": chat("a" * 35 + "b")},
        {"timestamp": 2, **chat("a" * 20)},
        {"timestamp": 3, "path": "/v1/embeddings", "body": {}},
        tokenize=letters,
    )
    one, other, third = requests_of(found, Replay(16))
    assert (one.tokens, len(one.blocks), shared(one, other), shared(one, third)) == (40, 3, 2, 1)


def test_lines_without_a_time_are_spread_evenly_if_wanted() -> None:
    line = {"model": "tiny", "prompt": "abc"}
    found = read(line, line, tokenize=lambda *_: array("I", [1]), gap_seconds=0.5)
    assert [one.at for one in found] == [0.0, 0.5]


def test_trace_of_one_model_leaves_out_the_others() -> None:
    lines = [mooncake(0, 5, [1], model="a"), mooncake(0, 6, [1], model="b"), mooncake(0, 0, [])]
    trace = Trace(model="a")
    trace.read("x", [json.dumps(line).encode() for line in lines])
    assert ([one.tokens for one in trace.requests], trace.skipped) == ([5], 2)
    with pytest.raises(ValueError, match=r"line 2: another model \(a, b\): .* --model"):
        read(*lines)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"{", "Input data was truncated"),
        (b"[]", "Expected `object`"),
        (b'{"timestamp": 0}', "neither `input_length`"),
        (b'{"input_length": 5}', "neither `timestamp` nor `time`: give --arrivals"),
        (b'{"timestamp": "x", "input_length": 5}', "`float | null`"),
        (b'{"timestamp": 1e300, "input_length": 5}', "`timestamp` is no such number"),
        (b'{"time": "yesterday", "input_length": 5}', "Invalid isoformat string"),
        (b'{"timestamp": 0, "input_length": -5}', "from 0 to"),
        (b'{"timestamp": 0, "input_length": 99999999999999}', "from 0 to"),
        (b'{"timestamp": 0, "input_length": 5, "block_size": 0}', "`block_size` must be"),
        (b'{"timestamp": 0, "input_length": 5, "ttft_ms": -1e99}', "`ttft_ms` is no"),
        (b'{"timestamp": 0, "input_length": 5, "hash_ids": ["x"]}', "`int`"),
        (b'{"timestamp": 0, "body": {"prompt": "x"}}', "give --tokenizer or --config"),
    ],
)
def test_line_that_is_no_request_is_named(line: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=f"^log, line 2: .*{fault}"):
        Trace().read("log", [b"\n", line])


def test_lines_and_traces_are_bounded() -> None:
    with pytest.raises(ValueError, match="line 1: is longer than 100 bytes"):
        Trace(max_line_bytes=100).read("log", [b" " * 50 + b"{}" + b" " * 50])
    with pytest.raises(ValueError, match="line 2: more than"):
        read(mooncake(0, 5, [1, 2, 3]), mooncake(0, 5, [1, 2, 3]), max_blocks=5)
    with pytest.raises(ValueError, match="more than"):
        requests_of(read({"time": 0, "prompt_tokens": 100}), Replay(16), max_blocks=5)


def test_measured_of_needs_figures_in_most_lines() -> None:
    bare = {"time": 0, "prompt_tokens": 10}
    known = {**bare, "cached_length": 5, "ttft_ms": 500}
    assert measured_of(read(bare, bare, known)) == {}
    assert measured_of(read(known, known)) == {"": (2, 2, 0.5, 0.5, 0.5, 0.5)}
    cached = read({**bare, "cached_length": 5})
    assert measured_of(cached) == {"": (1, 0, 0.5, None, None, None)}
    assert measured_of(read({**bare, "ttft_ms": 500})) == {"": (1, 1, None, 0.5, 0.5, 0.5)}
    ours = {**known, "placed_by": "cost"}
    assert list(measured_of(read(ours, {**known, "placed_by": PROXY}))) == ["cost", PROXY]


@pytest.mark.parametrize(
    "lines",
    [
        [mooncake(0, 64, [1, 2], block_size=32), mooncake(1, 64, [1, 2], block_size=32)],
        [{"time": at, "prompt_tokens": 64, "session": "s"} for at in (0, 1)],
        [{"time": at, "body": {"prompt": "a"}} for at in (0, 1)],
    ],
)
def test_isolated_requests_share_blocks_only_within_their_tenant(lines: list[Any]) -> None:
    def prompts(isolates: bool, *tenants: str) -> int:
        owned = [
            {**line, "tenant" if name == "a" else "user": name}
            for line, name in zip(lines, tenants, strict=True)
        ]
        tokens = array("I", range(64))
        made = requests_of(
            read(*owned, tokenize=lambda _, __: tokens), Replay(32, isolates=isolates)
        )
        return shared(*made)

    assert prompts(False, "a", "b") == prompts(True, "b", "b") == 2
    assert prompts(True, "a", "b") == 0


def sessions(*lines: Any, **options: Any) -> list[str]:
    return [one.session for one in played(*lines, **options)]


def test_sessions_are_those_that_clients_name() -> None:
    named = {"session_header": "a", "session": "the router's guess", "began": 1.0}
    guessed = mooncake(2, 40, [9], session="the router's guess", began=1.0)
    foreign = mooncake(3_000, 40, [8], session="b")
    assert sessions(mooncake(1, 40, [7], **named), guessed, foreign) == ["a", "", "b"]


def test_sessions_that_no_line_names_are_those_of_requests_that_continue_each_other() -> None:
    size = 16
    lines = [
        mooncake(1, 3 * size, [1, 2, 3], block_size=size),
        mooncake(2, 2 * size, [1, 2], block_size=size),
        mooncake(3, 5 * size, [1, 2, 3, 4, 5], block_size=size),  # continues both
        mooncake(4, 5 * size, [1, 2, 3, 6, 7], block_size=size),  # shares, but continues none
        mooncake(5, 7 * size, [1, 2, 3, 4, 5, 8, 9], block_size=size),
        mooncake(6, 5 * size, [1, 2, 3, 4, 5], block_size=size),  # has no room for the answer
    ]
    for continues in (True, False):
        first, second, third, fourth, fifth, last = sessions(*lines, continues=continues)
        assert first == third == fifth
        assert len({first, second, fourth, last}) == 4


def test_session_goes_on_although_its_last_block_was_not_full() -> None:
    beginning = mooncake(1, 1_100, [1, 2, 3])
    following = mooncake(2, 2_000, [1, 2, 4, 5])
    first, second = sessions(beginning, following, size=128)
    assert first == second
