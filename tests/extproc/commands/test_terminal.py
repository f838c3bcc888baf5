from typing import Any

import pytest

from extproc.commands.layout import Layout, Tone, cut
from extproc.commands.terminal import MAX_CANDIDATES, explained, plain, table


def test_plain_removes_terminal_controls() -> None:
    assert plain("a\x1b[2Jb\n") == "a?[2Jb?"
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abcde~"


def test_table_is_as_wide_as_its_contents() -> None:
    assert table(["A", "NUMBER"], [["long", "1"]], "<>") == ["A     NUMBER", "long       1"]


def test_table_pads_a_toned_text_by_what_is_seen_of_it() -> None:
    toned = Layout(has_colours=True).tone("live", Tone.GOOD)
    (_, row) = table(["FEED", "B"], [[toned, "1"]], "<>")
    assert row == f"{toned}  1"


def candidate(name: str, cost: float | None = 24.0, **shown: Any) -> dict[str, Any]:
    terms = {"uncached": cost, "session": 0.0, "queued": 0.0, "running": 0.0}
    terms |= {"conversations": 0.0, "patience": 0.0, "uncached_tokens": cost, "slowness": 1.0}
    one = {
        "name": f"{name}:8000",
        "endpoint": f"{name}:8000",
        "state": "live",
        "overlap_tokens": 272,
        "uncertain_tokens": 0,
        "speculative_tokens": 0,
        "approximate_tokens": 0,
        "cost": cost,
        "cost_terms": None if cost is None else terms,
        "excluded": None,
        "sampled": cost is not None,
    }
    return one | shown


def answer(*candidates: dict[str, Any], **shown: Any) -> dict[str, Any]:
    one = {
        "prompt_tokens": 296,
        "weighed_tokens": 296,
        "decided_by": "cache",
        "decided": "load alone decided",
        "policy": "cost",
        "candidates": candidates,
        "pick": [candidates[0]["endpoint"]] if candidates else [],
        "steered": True,
        "reason": "overlap",
        "why": "no worker may answer this request",
        "prefill": None,
        "source": None,
    }
    return one | shown


def test_explanation_names_the_ids_of_a_request_that_was_decided() -> None:
    ids = {"request_id": "x7", "trace_id": "4b"}
    assert explained(answer(candidate("a"), **ids))[1] == "request x7, trace 4b"
    assert explained(answer(candidate("a"), **ids | {"trace_id": ""}))[1] == "request x7"


def test_explained_is_a_sentence_and_a_table() -> None:
    named = candidate("w1", endpoint="10.0.0.1:8000")
    other = candidate("w2", 296.4, overlap_tokens=0, uncertain_tokens=96)
    shown = answer(other, named, pick=["10.0.0.1:8000", "w2:8000"])
    assert explained(shown) == [
        (
            "It would go to w1:8000 (10.0.0.1:8000): it holds 272 of the 296 prompt tokens;"
            " its cost is 24 tokens of work, the next best is w2:8000 with 296."
        ),
        "",
        "WORKER                   FEED  HOLDS  COMPUTE  QUEUED  RUNNING  COST  NOTES",
        "w1:8000 (10.0.0.1:8000)  live    272       24       0        0    24  picked",
        (
            "w2:8000                  live      0      296       0        0   296"
            "  number 2 if that fails; 96 uncertain"
        ),
        "",
        (
            "HOLDS counts tokens; COST is COMPUTE + QUEUED + RUNNING, in tokens of work"
            " (tokens, slowness and weight multiplied); the lowest wins."
        ),
    ]


def test_explained_says_what_was_done_before_the_pick() -> None:
    shown = answer(candidate("a"), treatment={"why": "it gets a salt"})
    assert explained(shown)[1] == "Before: it gets a salt."
    assert explained(answer(candidate("a"), treatment={"why": ""}))[1] == ""


def test_explained_says_whether_token_ids_go_along() -> None:
    shown = answer(candidate("a"), token_ids={"why": "a sample disagreed (b:1)"})
    assert explained(shown)[1] == "Token ids: a sample disagreed (b:1)."


def test_explained_gives_each_reason_in_words() -> None:
    counted = candidate("a", uncertain_tokens=1, speculative_tokens=2, approximate_tokens=3)
    for reason, words in (
        ("uncertain_overlap", "it probably holds 1 of"),
        ("speculative_overlap", "a request under way there will leave 2 of"),
        ("approximate_overlap", "it was sent 3 of"),
        ("nothing_cached", "no worker holds any of"),
        ("policy_random", "the policy random chose it"),
        ("no_tokenizer", "load alone decided; the tokens are not known (no_tokenizer)"),
    ):
        assert words in explained(answer(counted, reason=reason))[0]
    assert "1 uncertain; 2 speculative; 3 approximate" in explained(answer(counted))[3]


def test_explained_says_what_decided_in_the_words_of_the_router() -> None:
    words = "the record of texts decided: about 150 of its 200 tokens were sent there (75%)"
    terms = candidate("a")["cost_terms"]
    crowded = candidate(
        "a",
        approximate_tokens=150,
        cost_terms=terms | {"conversations": 7.0, "queued": 9.0, "patience": 5.0},
        cost=35.0,
    )
    unknown = {"prompt_tokens": 0, "weighed_tokens": 200, "reason": "no_tokenizer"}
    lines = explained(answer(crowded, **unknown, decided_by="texts", decided=words))
    assert lines[0].startswith(f"It would go to a:8000: {words}")
    assert "the tokens are not known (no_tokenizer)" in lines[0]
    assert lines[3].split()[4:6] == ["4", "0"]
    assert "7 more for the conversations there; 5 more queued" in lines[3]


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (
            {"uncached_tokens": 46.0, "slowness": 0.76, "uncached": 34.96},
            "46 tokens x 0.76 slowness",
        ),
        ({"uncached_tokens": 10.0, "slowness": 1.0, "uncached": 15.0}, "10 tokens x 1.50 weight"),
        (
            {"uncached_tokens": 10.0, "slowness": 2.0, "uncached": 30.0},
            "10 tokens x 2.00 slowness x 1.50 weight",
        ),
    ],
)
def test_explained_says_how_a_cost_differs_from_the_tokens(
    terms: dict[str, float], words: str
) -> None:
    one = candidate("a")
    lines = explained(answer(one | {"cost_terms": one["cost_terms"] | terms}))
    assert lines[3].endswith(f"picked; computes {words}")
    none = one["cost_terms"] | {"uncached_tokens": 0.0, "slowness": 0.5, "uncached": 0.0}
    assert explained(answer(one | {"cost_terms": none}))[3].endswith("picked")


def test_explained_lists_excluded_workers_last_with_their_reason() -> None:
    busy, unseen = candidate("b", 1.0, excluded="serves n"), candidate("c", None)
    lines = explained(answer(candidate("a"), busy, unseen, policy="random"))
    assert [line.split()[0] for line in lines[3:6]] == ["a:8000", "c:8000", "b:8000"]
    assert lines[4].endswith("-  not compared: not in the random sample")
    assert lines[5].endswith("-  not possible: serves n")
    assert lines[-1].endswith("This was decided by the policy random.")
    assert "next best" not in lines[0]


def test_explained_names_a_missing_worker_and_an_unsteered_request() -> None:
    assert explained(answer()) == ["It would go to no worker: no worker may answer this request."]
    lines = explained(answer(candidate("a"), steered=False))
    assert lines[0].startswith(
        "It is not steered, so Envoy chooses; steered, it would go to a:8000"
    )


def test_explained_names_prefill_worker_and_source() -> None:
    split = {"pick": "p:1", "why": "it is idle"}
    source = {"tokens": 64, "endpoint": "s:1"}
    (sentence, *_) = explained(answer(candidate("a"), prefill=split, source=source))
    assert sentence.endswith(". p:1 computes the prompt: it is idle. It pulls 64 tokens from s:1.")
    (sentence, *_) = explained(answer(candidate("a"), prefill=split | {"pick": None}))
    assert sentence.endswith(". The same worker computes the prompt: it is idle.")


def test_explained_says_what_the_pick_would_load_from_a_store() -> None:
    loads = "it would load 900 tokens from the store s: 400 tokens of work less"
    one = candidate("a")
    one["cost_terms"] = one["cost_terms"] | {"fetched": 400.0}
    lines = explained(answer(one, loads=loads, reason="nothing_cached"))
    assert "it holds none of the" in lines[0]
    assert lines[0].endswith(f". I{loads[1:]}.")
    assert lines[3].endswith("computes 400 less, as it would fetch blocks")


def test_explained_says_where_siblings_lower_a_cost() -> None:
    one = candidate("a")
    one["cost_terms"] = one["cost_terms"] | {"siblings": 700.0}
    assert explained(answer(one))[3].endswith("700 less for siblings just sent there")


def test_explained_shows_a_few_of_many_candidates() -> None:
    many = [candidate(f"w{number}") for number in range(MAX_CANDIDATES + 5)]
    lines = explained(answer(*many))
    assert "... and 5 more; --json has all of them" in lines
    assert len(lines) == MAX_CANDIDATES + 6
