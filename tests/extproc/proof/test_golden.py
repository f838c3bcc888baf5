"""What golden requests show of an engine's tokens; here a token is a character's number."""

import json
from collections.abc import Sequence

import pytest

from extproc.base.engine import RUST, VLLM, Engine, Release
from extproc.base.errors import RequestError
from extproc.proof.golden import (
    GOLDEN,
    MAX_ANSWER_BYTES,
    GoldenTokens,
    NoTokenizeError,
    TokenizerSilentError,
    comparison,
    golden_for,
    golden_tokens,
    in_words,
    mismatch,
    own_tokens,
    tokens_there,
)
from extproc.proof.state import Comparison, GoldenVerdict, Mismatch, Proof, TokenProof
from extproc.requests.dialect import NEWEST, Dialect, dialect_of
from extproc.requests.prompt import (
    AGREED_FORMS,
    CONVERSATION,
    CUT,
    EVEN_DAY,
    FRONT_END,
    IN_CODE,
    ODD_DAY,
    SWITCHES,
    TEXT,
    TOOLS,
    Chat,
    Prompt,
    Text,
    forms_of,
)
from kvstate.overlap import Tokens

BY_NAME = {one.name: one for one in GOLDEN}
TEXT_NAME, CHAT_NAME = GOLDEN[0].name, "a conversation"
TOOLS_NAME, THINKS_NAME = "a conversation with tools", "a conversation that thinks"


def ids(text: str) -> Tokens:
    return Tokens("I", map(ord, text))


def text_of(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def golden_of(
    *differing: str, refused: Sequence[str] = (), unkeyed: Sequence[str] = ()
) -> list[GoldenTokens]:
    """The results of all golden requests: some differ; for some, one side has no tokens."""
    return [
        GoldenTokens(
            one,
            "no_chat_template" if one.name in unkeyed else ids("abc"),
            "status 400" if one.name in refused else ids("abd" if one.name in differing else "abc"),
        )
        for one in GOLDEN
    ]


def of(*names: str, **more: Sequence[str]) -> Comparison:
    return comparison(golden_of(*names, **more), text_of)


def proof_of(*names: str, **more: Sequence[str]) -> TokenProof:
    """The state of a worker's tokens after these results."""
    proof = TokenProof("w")
    proof.expect()
    proof.compare(of(*names, **more), 1.0)
    return proof


def first_of(found: Comparison) -> Mismatch:
    return next(one.mismatch for one in found.forms.values() if one.mismatch is not None)


CHATS = [one.name for one in GOLDEN if isinstance(one.prompt, Chat)]


def test_golden_requests_cover_every_form_and_api() -> None:
    forms = {one.forms for one in GOLDEN}
    assert forms == {TEXT, CONVERSATION, CONVERSATION | TOOLS, CONVERSATION | SWITCHES}
    assert {"messages (Anthropic's API)", "a response"} <= BY_NAME.keys()
    assert all(one.question("m").startswith(b'{"model":"m"') for one in GOLDEN)


def test_forms_of_a_prompt_may_be_several_and_of_token_ids_none() -> None:
    switched = Chat([], {"tools": [], "thinking": True})
    assert forms_of(switched) == CONVERSATION | TOOLS | SWITCHES
    assert forms_of(ids("a")) == 0


def test_same_tokens_everywhere_prove_all_forms() -> None:
    assert (of().compared, of().reason) == (len(GOLDEN), "")
    assert proof_of().is_proved(AGREED_FORMS)


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
def test_verification_blames_the_form_that_simpler_requests_lack(name: str, forms: int) -> None:
    proof = proof_of(name)
    assert (proof.summary.proof, proof.refuted) == (Proof.REFUTED, forms)
    assert first_of(of(name))[:4] == (name, 2, ord("c"), ord("d"))


def test_verification_names_the_simplest_difference_and_all_forms() -> None:
    assert proof_of(TOOLS_NAME, CHAT_NAME).refuted == CONVERSATION | TOOLS
    assert proof_of(TOOLS_NAME, CHAT_NAME).as_json(1.0)["request"] == CHAT_NAME


def test_verification_distrusts_all_forms_for_texts_where_conversations_are_refused() -> None:
    assert proof_of(TEXT_NAME, refused=CHATS).refuted == AGREED_FORMS


def test_texts_alone_prove_texts_only_where_conversations_are_keyed_here() -> None:
    proof = proof_of(refused=CHATS)
    assert (proof.summary.proof, proof.compared) == (Proof.UNPROVED, len(GOLDEN) - len(CHATS))
    assert proof.is_proved(TEXT)
    assert "a conversation is not compared: status 400" in proof.summary.reason


def test_verification_needs_no_unkeyed_requests() -> None:
    assert proof_of(unkeyed=CHATS, refused=CHATS).summary.proof is Proof.PROVED
    proof = proof_of(unkeyed=list(BY_NAME))
    assert proof.summary[:2] == (Proof.UNPROVED, "no golden request is keyed here")


def test_refused_golden_request_is_named_but_changes_nothing() -> None:
    proof = proof_of(refused=[TOOLS_NAME])
    assert (proof.summary.proof, proof.compared) == (Proof.PROVED, len(GOLDEN) - 1)
    assert TOOLS_NAME in proof.as_json(1.0)["why"]
    proof = proof_of(refused=[TEXT_NAME], unkeyed=CHATS)
    assert proof.summary.proof is Proof.PROVED


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
def test_mismatch_names_the_likely_cause(name: str, ours: str, engines: str, words: str) -> None:
    found = mismatch(BY_NAME[name], ids(ours), ids(engines), text_of)
    if not words:
        assert found is None
        return
    assert found is not None
    assert words in found.cause


def test_mismatch_of_equal_text_is_another_vocabulary() -> None:
    found = mismatch(BY_NAME[CHAT_NAME], ids("ab"), ids("ba"), lambda _: "the same")
    assert found is not None
    assert "cut into other tokens" in found.cause


def test_in_words_names_position_text_before_and_both_texts() -> None:
    found = mismatch(BY_NAME[CHAT_NAME], ids("<user>hi<end>"), ids("<user>hi[end]"), text_of)
    assert found is not None
    assert in_words(found) == (
        "of a conversation, token 8 is 91 in the engine and 60 here, by /tokenize:"
        " after '<user>hi', '[end]' in the engine and '<end>' here: the chat template is another"
        " one, or the engine's front end is, such as one in Rust"
    )


def test_in_words_names_missing_tokens_of_either_side() -> None:
    for ours, engines, words in (
        ("abc", "ab", "token 2 is missing in the engine and 99 here"),
        ("ab", "abc", "token 2 is 99 in the engine and missing here"),
    ):
        found = mismatch(BY_NAME[CHAT_NAME], ids(ours), ids(engines), text_of)
        assert found is not None
        assert words in in_words(found)


def test_mismatch_of_empty_tokens_is_a_difference() -> None:
    assert mismatch(BY_NAME[CHAT_NAME], ids(""), ids("a"), text_of) is not None


def test_worker_is_refuted_for_the_forms_that_differ_until_they_are_the_same() -> None:
    proof = proof_of()
    assert proof.refuted == 0
    proof.compare(of(TOOLS_NAME), 2.0)
    assert proof.refuted == TOOLS
    assert proof.as_json(5.0)["seconds"] == 3.0
    for _ in range(8):
        proof.count(CONVERSATION, 10, 11, 3.0)
    assert proof.refuted == CONVERSATION | TOOLS
    proof.compare(of(), 4.0)
    assert proof.refuted == CONVERSATION  # golden requests of this form never differed


def test_counts_seen_before_the_engine_was_mended_no_longer_count() -> None:
    proof = proof_of(CHAT_NAME)
    for _ in range(8):
        proof.count(CONVERSATION, 10, 11, 3.0)
    proof.compare(of(), 4.0)
    assert proof.refuted == 0


def test_silent_worker_changes_nothing_and_one_without_tokens_is_unproved() -> None:
    proof = proof_of(TOOLS_NAME)
    proof.uncompared("no answer", 2.0, for_now=True)
    assert proof.refuted == TOOLS
    proof.uncompared("it has no /tokenize", 3.0, for_now=False)
    assert (proof.refuted, proof.summary[:2]) == (0, (Proof.UNPROVED, "it has no /tokenize"))


class TextEncoder:
    """A tokenizer of texts alone."""

    text_forms = 0
    added_tokens: Sequence[str] = ()
    renders_in_code = False
    start_forms = 0
    is_shown_by_tokenize = True

    def encode(self, prompt: Prompt) -> Tokens:
        if not isinstance(prompt, Text):
            raise RequestError("no_chat_template")
        return ids(prompt.text)

    def text_of(self, tokens: Sequence[int]) -> str:
        return text_of(tokens)


def test_prompts_that_are_not_keyed_here_have_a_reason_instead_of_tokens() -> None:
    here = dict(zip(BY_NAME, own_tokens(TextEncoder()), strict=True))
    assert here[CHAT_NAME] == "no_chat_template"
    assert here[TEXT_NAME] == ids("The quick brown fox jumps over the lazy dog.")


class CodeEncoder(TextEncoder):
    """A tokenizer of a model whose conversations the engine renders in code, by its release."""

    renders_in_code = True

    def __init__(self, *, is_shown: bool) -> None:
        self.is_shown_by_tokenize = is_shown

    def encode(self, prompt: Prompt) -> Tokens:
        assert isinstance(prompt, Chat | Text)
        return ids("abc" if isinstance(prompt, Text) or prompt.dialect is NEWEST else "old")


def in_code(*, is_shown: bool, dialect: Dialect) -> TokenProof:
    """The state of a worker that tokenizes everything to "abc"."""
    encoder = CodeEncoder(is_shown=is_shown)
    golden = golden_for(encoder, dialect)
    ours, engines = own_tokens(encoder, golden), [ids("abc")] * len(golden)
    proof = TokenProof("w")
    proof.compare(comparison(golden_tokens(encoder, golden, ours, engines), text_of), 1.0)
    return proof


def test_conversations_in_code_are_proved_and_refuted_by_the_workers_release() -> None:
    assert in_code(is_shown=True, dialect=NEWEST).is_proved(IN_CODE | CONVERSATION | TOOLS)
    old = in_code(is_shown=True, dialect=dialect_of(Engine(VLLM, Release(0, 24))))
    assert old.refuted & IN_CODE
    assert not old.refuted & TEXT


def test_conversations_that_tokenize_renders_otherwise_are_neither_proved_nor_refuted() -> None:
    proof = in_code(is_shown=False, dialect=NEWEST)
    assert (proof.proved, proof.refuted) == (TEXT, 0)
    assert "renders conversations otherwise" in proof.summary.reason


class DatedEncoder(CodeEncoder):
    """A tokenizer of a model with a date in its conversations. today: in what it tokenizes."""

    start_forms = ODD_DAY
    today = "on 2026-11-23: hi"

    def encode(self, prompt: Prompt) -> Tokens:
        assert isinstance(prompt, Chat | Text)
        return ids("abc" if isinstance(prompt, Text) else self.today)


RUST_DIALECT = dialect_of(Engine(VLLM, Release(0, 33), RUST))


def started(day: str) -> TokenProof:
    """The state of a worker whose Rust front end writes a day, and does not render otherwise."""
    encoder = DatedEncoder(is_shown=False)
    golden = golden_for(encoder, RUST_DIALECT)
    engines = [ids("abc" if isinstance(one.prompt, Text) else day) for one in golden]
    compared = golden_tokens(encoder, golden, own_tokens(encoder, golden), engines)
    proof = TokenProof("w")
    proof.compare(comparison(compared, text_of), 1.0)
    return proof


def test_rust_front_end_that_started_today_proves_the_form_of_today() -> None:
    proof = started(DatedEncoder.today)
    assert proof.is_proved(CONVERSATION | IN_CODE | FRONT_END | ODD_DAY)
    assert not proof.is_proved(EVEN_DAY)


def test_rust_front_end_that_started_before_today_is_refuted_for_its_date() -> None:
    proof = started("on 2026-11-22: hi")
    assert proof.refuted & ODD_DAY
    assert not proof.proved & (CONVERSATION | IN_CODE | FRONT_END | ODD_DAY)
    assert "writes the date of its own start" in proof.summary.reason


def test_rust_front_end_that_differs_in_more_than_its_date_is_to_blame() -> None:
    proof = started("on 2026-11-22: ho")
    assert proof.refuted & IN_CODE
    assert "Rust front end renders this template in another way" in proof.summary.reason


def test_rust_front_end_is_asked_with_the_arguments_that_a_client_wrote() -> None:
    golden = {one.name: one for one in golden_for(DatedEncoder(is_shown=False), RUST_DIALECT)}
    asked = json.loads(golden["a conversation with a tool's result"].question(None))
    assert asked["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"word": "fox"}'


def test_proof_of_a_start_ends_with_the_next_day_or_without_an_answer() -> None:
    proof = TokenProof("w")
    for end in ("another day", "no answer", "restart"):
        proof.compare(Comparison(1, {EVEN_DAY: GoldenVerdict(is_same=True)}), 1.0)
        assert proof.is_proved(EVEN_DAY)
        if end == "another day":
            proof.compare(Comparison(1, {ODD_DAY: GoldenVerdict(is_same=True)}), 2.0)
        elif end == "no answer":
            proof.uncompared("no answer", 2.0, for_now=True)
        else:
            proof.restore(EVEN_DAY, 2.0)
            proof.restart(2.0)
        assert not proof.is_proved(EVEN_DAY)


def test_proof_of_a_start_is_not_restored() -> None:
    proof = TokenProof("w")
    proof.restore(EVEN_DAY | ODD_DAY | IN_CODE, 1.0)
    assert proof.proved == IN_CODE


class DoubtfulEncoder(TextEncoder):
    """A tokenizer that some releases rebuild."""

    text_forms = CUT


@pytest.mark.parametrize(("engines", "proved", "refuted"), [(0, TEXT | CUT, 0), (2, TEXT, CUT)])
def test_how_texts_are_cut_is_shown_by_a_text_of_many_kinds(
    engines: int, proved: int, refuted: int
) -> None:
    golden = [one for one in golden_for(DoubtfulEncoder(), NEWEST) if one.forms & TEXT]
    ours = own_tokens(DoubtfulEncoder(), golden)
    theirs = [
        ids(one.prompt.text[engines:] if one.forms & CUT else one.prompt.text)
        for one in golden
        if isinstance(one.prompt, Text)
    ]
    compared = golden_tokens(DoubtfulEncoder(), golden, ours, theirs)
    proof = TokenProof("w")
    proof.compare(comparison(compared, text_of), 1.0)
    assert (proof.proved, proof.refuted) == (proved, refuted)
    assert ("as tokenizer_class says" in proof.state_of(CUT).reason) is bool(refuted)


async def answered(status: int, body: bytes = b"") -> list[Tokens | str]:
    async def post(_: bytes) -> tuple[int, bytes]:
        return status, body

    return await tokens_there(post, None)


async def test_engine_has_tokens_or_refuses_a_question() -> None:
    assert await answered(200, b'{"tokens": [1, 2]}') == [Tokens("I", [1, 2])] * len(GOLDEN)
    assert await answered(400) == ["/tokenize: status 400"] * len(GOLDEN)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, b"", NoTokenizeError),
        (500, b"", TokenizerSilentError),
        (200, b"no JSON", TokenizerSilentError),
        (200, b" " * (MAX_ANSWER_BYTES + 1), TokenizerSilentError),
    ],
)
async def test_engine_without_any_answer_is_silent_or_cannot_tokenize(
    status: int, body: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error, match="/tokenize"):
        await answered(status, body)


async def test_equal_questions_are_asked_once() -> None:
    asked: list[bytes] = []

    async def post(question: bytes) -> tuple[int, bytes]:
        asked.append(question)
        return 200, b'{"tokens": [1]}'

    assert len(await tokens_there(post, "m", [*GOLDEN, GOLDEN[0]])) == len(GOLDEN) + 1
    assert len(asked) == len(set(asked)) == len({one.question("m") for one in GOLDEN})


class AddingEncoder(TextEncoder):
    """A tokenizer with added tokens, in doubt."""

    text_forms = CUT
    added_tokens = ("<think>", *(f"<unused{number}>" for number in range(1_000)), "</think>")

    def encode(self, prompt: Prompt) -> Tokens:
        assert isinstance(prompt, Chat | Text)
        return ids(prompt.text if isinstance(prompt, Text) else prompt.messages[0]["content"])


def test_added_tokens_stand_in_a_text_and_in_a_users_turn() -> None:
    alone, turn = golden_for(AddingEncoder(), NEWEST)[-2:]
    assert (alone.forms, turn.forms) == (TEXT | CUT, CONVERSATION)
    assert isinstance(alone.prompt, Text)
    assert isinstance(turn.prompt, Chat)
    text = alone.prompt.text
    assert turn.prompt.messages[0]["content"] == text
    assert "say <think> and<think>\n" in text
    assert "</think>" in text


def test_difference_in_added_tokens_names_the_files_beside_the_tokenizer() -> None:
    golden = golden_for(AddingEncoder(), NEWEST)[-2:]
    ours = own_tokens(AddingEncoder(), golden)
    engines: list[Tokens | str] = [ids("say x"), ids("say x")]
    found = comparison(golden_tokens(AddingEncoder(), golden, ours, engines), text_of)
    assert not found.forms[CUT].is_same
    assert "its added tokens are others: tokenizer_config.json" in found.forms[CUT].reason


def test_difference_as_with_thinking_off_names_the_engines_flag() -> None:
    switched = next(one for one in GOLDEN if "does not think" in one.name)
    compared = [
        GoldenTokens(BY_NAME[CHAT_NAME], ids("hi<think>"), ids("hi<off>")),
        GoldenTokens(switched, ids("hi<off>"), ids("hi<off>")),
    ]
    found = comparison(compared, text_of).forms[CONVERSATION]
    assert "as of a conversation that does not think here" in found.reason
    assert "--default-chat-template-kwargs" in found.reason
