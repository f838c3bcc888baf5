"""What golden requests show of an engine's tokens; here a token is a character's number."""

from collections.abc import Sequence

import pytest

from extproc.checking.golden import GOLDEN, Told, in_words, mismatch, verification
from extproc.checking.self_check import (
    DIFFERENT,
    NOT_ASKED,
    NOT_VERIFIED,
    VERIFIED,
    Verification,
    WorkerCheck,
)
from extproc.requests.prompt import ALL_FORMS, CONVERSATION, SWITCHES, TEXT, TOOLS, Chat, forms_of
from kvstate.overlap import Tokens

BY_NAME = {one.name: one for one in GOLDEN}
TEXT_NAME, CHAT_NAME = GOLDEN[0].name, "a conversation"
TOOLS_NAME, THINKS_NAME = "a conversation with tools", "a conversation that thinks"


def ids(text: str) -> Tokens:
    return Tokens("I", map(ord, text))


def text_of(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def told(*differing: str, refused: Sequence[str] = (), unkeyed: Sequence[str] = ()) -> list[Told]:
    """The results of all golden requests: some differ; for some, one side has no tokens."""
    return [
        Told(
            one,
            "no_chat_template" if one.name in unkeyed else ids("abc"),
            "status 400" if one.name in refused else ids("abd" if one.name in differing else "abc"),
        )
        for one in GOLDEN
    ]


def of(*names: str, **more: Sequence[str]) -> Verification:
    return verification(told(*names, **more), text_of)


CHATS = [one.name for one in GOLDEN if isinstance(one.prompt, Chat)]


def test_golden_requests_are_of_every_form_and_api_and_each_can_be_asked_for() -> None:
    forms = {one.forms for one in GOLDEN}
    assert forms == {TEXT, CONVERSATION, CONVERSATION | TOOLS, CONVERSATION | SWITCHES}
    assert {"messages (Anthropic's API)", "a response"} <= BY_NAME.keys()
    assert all(one.question("m").startswith(b'{"model":"m"') for one in GOLDEN)


def test_a_prompt_may_have_several_forms_and_token_ids_have_none() -> None:
    switched = Chat([], {"tools": [], "thinking": True})
    assert forms_of(switched) == CONVERSATION | TOOLS | SWITCHES
    assert forms_of(ids("a")) == 0


def test_the_same_tokens_everywhere_are_verified() -> None:
    assert of() == Verification(VERIFIED, "", len(GOLDEN))


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        (TEXT_NAME, TEXT),
        (CHAT_NAME, CONVERSATION),
        (TOOLS_NAME, TOOLS),
        (THINKS_NAME, SWITCHES),
        ("messages (Anthropic's API)", TOOLS),
        ("a response", CONVERSATION),
    ],
)
def test_a_difference_is_blamed_on_what_simpler_requests_have_not(name: str, forms: int) -> None:
    found = of(name)
    assert (found.result, found.forms) == (DIFFERENT, forms)
    assert found.mismatch is not None
    assert found.mismatch[:4] == (name, 2, ord("c"), ord("d"))


def test_the_simplest_request_that_differs_is_named_and_all_forms_count() -> None:
    found = of(TOOLS_NAME, CHAT_NAME)
    assert found.forms == CONVERSATION | TOOLS
    assert found.mismatch is not None
    assert found.mismatch.request == CHAT_NAME


def test_texts_that_differ_count_for_all_where_conversations_cannot_be_compared() -> None:
    assert of(TEXT_NAME, refused=CHATS).forms == ALL_FORMS


def test_texts_alone_verify_nothing_where_conversations_are_keyed_here() -> None:
    found = of(refused=CHATS)
    assert (found.result, found.compared) == (NOT_VERIFIED, len(GOLDEN) - len(CHATS))
    assert "a conversation is not compared: status 400" in found.why


def test_what_is_not_keyed_here_need_not_be_compared() -> None:
    assert of(unkeyed=CHATS, refused=CHATS).result == VERIFIED
    everything = list(BY_NAME)
    assert of(unkeyed=everything).result == NOT_VERIFIED


def test_one_request_that_is_refused_is_told_but_changes_nothing() -> None:
    found = of(refused=[TOOLS_NAME])
    assert (found.result, found.compared) == (VERIFIED, len(GOLDEN) - 1)
    assert TOOLS_NAME in found.why
    assert of(refused=[TEXT_NAME], unkeyed=CHATS).result == VERIFIED


CAUSES = [
    (CHAT_NAME, "<s>hi", "<s>hi", ""),
    (CHAT_NAME, "^hi", "^^hi", "the engine begins with its special token (BOS) twice"),
    (CHAT_NAME, "^^hi", "^hi", "the router begins with its special token (BOS) twice"),
    (CHAT_NAME, "hi", "^hi", "the engine puts a special token (BOS) in front"),
    (CHAT_NAME, "^hi", "hi", "the router puts a special token (BOS) in front"),
    (CHAT_NAME, "user: hi", "user: hi\n", "as a trailing newline"),
    (CHAT_NAME, "user\nhi", "user hi", "only white space differs"),
    (CHAT_NAME, "on 2026-11-22: hi", "on 2026-11-23: hi", "the template writes a date"),
    (CHAT_NAME, "Today: 22 Nov 2026", "Today: 23 November 2026", "the template writes a date"),
    (CHAT_NAME, "user: hi", "user: hi assistant:", "the templates end differently"),
    (CHAT_NAME, "user: hi assistant:", "user: hi", "the templates end differently"),
    (CHAT_NAME, "<user>hi", "[user]hi", "the chat template is another one"),
    (TEXT_NAME, "fox", "dog", "another tokenizer or vocabulary"),
    (TOOLS_NAME, "{a}", "{b}", "tools are rendered differently"),
    (THINKS_NAME, "<think>", "<no>", "the template takes enable_thinking differently"),
]


@pytest.mark.parametrize(("name", "ours", "engines", "words"), CAUSES)
def test_the_likely_cause_is_named(name: str, ours: str, engines: str, words: str) -> None:
    found = mismatch(BY_NAME[name], ids(ours), ids(engines), text_of)
    if not words:
        assert found is None
        return
    assert found is not None
    assert words in found.cause


def test_the_same_text_of_other_tokens_is_another_vocabulary() -> None:
    found = mismatch(BY_NAME[CHAT_NAME], ids("ab"), ids("ba"), lambda _: "the same")
    assert found is not None
    assert "cut into other tokens" in found.cause


def test_a_sentence_names_the_place_the_text_before_it_and_both_texts() -> None:
    found = mismatch(BY_NAME[CHAT_NAME], ids("<user>hi<end>"), ids("<user>hi[end]"), text_of)
    assert found is not None
    assert in_words(found) == (
        "of a conversation, token 8 is 91 in the engine and 60 here, by /tokenize:"
        " after '<user>hi', '[end]' in the engine and '<end>' here: the chat template is another"
        " one"
    )


def test_an_engine_whose_tokens_end_before_ours_or_after_is_told_so() -> None:
    for ours, engines, words in (
        ("abc", "ab", "token 2 is missing in the engine and 99 here"),
        ("ab", "abc", "token 2 is 99 in the engine and missing here"),
    ):
        found = mismatch(BY_NAME[CHAT_NAME], ids(ours), ids(engines), text_of)
        assert found is not None
        assert words in in_words(found)


def test_empty_tokens_are_a_difference_like_any_other() -> None:
    assert mismatch(BY_NAME[CHAT_NAME], ids(""), ids("a"), text_of) is not None


def test_a_worker_is_distrusted_for_the_forms_that_differ_until_it_is_verified() -> None:
    check = WorkerCheck("w")
    check.verify(NOT_ASKED)
    assert check.distrusted_forms == 0
    check.verify(of(TOOLS_NAME))
    assert check.distrusted_forms == TOOLS
    check.result.is_distrusted = True
    assert check.distrusted_forms == ALL_FORMS
    check.verify(of())
    assert check.distrusted_forms == 0  # what was seen before the engine was fixed no longer counts


def test_what_live_traffic_shows_stays_where_golden_requests_saw_no_difference() -> None:
    check = WorkerCheck("w")
    check.verify(of())
    check.result.is_distrusted = True
    check.verify(of())
    assert check.distrusted_forms == ALL_FORMS
    assert check.verification.shown()["position"] is None
    check.verify(of(CHAT_NAME))
    assert check.verification.shown()["position"] == 2
