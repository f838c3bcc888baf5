from array import array

from extproc.media.identities import Identity
from extproc.media.knowledge import MediaKnowledge
from extproc.media.prompts import MAX_PROMPT_TOKENS, FilledPrompt, filled
from extproc.tokenizing.media_parts import MediaParts
from kvstate.media import FIRST_PAD, MediaIds
from tests.extproc.media.stores import PAD, START, WRITTEN, Shot, prompt

HEAD, ASK = [1, 2, 3], [20, 21]
CAT, URL = Shot("cat", 2), Shot("url", 2, is_exact=False)
KNOWN = Identity("CAT", ((START, 1), (PAD, 2), (92, 1)), lead=1)
MEDIA_IDS = MediaIds(5)


def of(*pieces: object, known: Identity | None = KNOWN) -> FilledPrompt:
    sent = prompt(*pieces)  # type: ignore[arg-type]
    return filled(sent, {b"cat": known, b"url": known}.get, MEDIA_IDS)


def test_filled_prompt_has_the_item_in_its_ids() -> None:
    full = of(HEAD, CAT, ASK)
    assert list(full.tokens) == [*HEAD, START, MEDIA_IDS.token("CAT", PAD), PAD, 92, *ASK]
    assert (full.is_whole, full.sure_tokens, full.text_tokens) == (True, None, 3)


def test_filled_prompt_ends_at_an_unknown_item() -> None:
    full = of(HEAD, Shot("other"), ASK)
    assert list(full.tokens) == [*HEAD, START, PAD]
    assert (full.is_whole, full.known_tokens) == (False, 3)


def test_filled_prompt_has_the_known_part_of_an_item() -> None:
    full = of(HEAD, CAT, ASK, known=Identity("CAT", ((START, 1), (PAD, 2)), 1, is_whole=False))
    assert list(full.tokens) == [*HEAD, START, MEDIA_IDS.token("CAT", PAD), PAD, PAD]
    assert (full.is_whole, full.known_tokens) == (False, 6)
    full = of(HEAD, CAT, ASK, known=Identity("CAT", ((START, 1),), 1, is_whole=False))
    assert list(full.tokens) == [*HEAD, START, START]


def test_filled_prompt_is_sure_up_to_the_first_url() -> None:
    assert of(HEAD, CAT, ASK, URL, ASK).sure_tokens == len(HEAD) + 4 + len(ASK)


def test_filled_prompt_has_pads_as_they_are() -> None:
    pad = FIRST_PAD + 7
    full = of(HEAD, CAT, ASK, known=Identity(None, ((START, 1), (pad, 2)), 1))
    assert list(full.tokens) == [*HEAD, START, pad, pad, *ASK]


def test_filled_prompt_is_bounded() -> None:
    large = Identity("CAT", ((PAD, MAX_PROMPT_TOKENS // 2),))
    full = of(HEAD, CAT, ASK, CAT, ASK, CAT, ASK, known=large)
    assert not full.is_whole
    assert len(full.tokens) <= MAX_PROMPT_TOKENS + 16


def test_knowledge_keys_items_by_model_adapter_and_arguments() -> None:
    knowledge = MediaKnowledge(b"key")
    parts = MediaParts((array("I", HEAD), array("I", ASK)), (WRITTEN,))
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    media = [("image", part)]
    made = [
        knowledge.prompt(parts, media, (model, lora, None), arguments)
        for model, lora, arguments in (
            ("tiny", None, {}),
            ("tiny", None, {"mm_processor_kwargs": {"max_pixels": 9}}),
            ("tiny", "ad", {}),
            ("other", None, {}),
        )
    ]
    assert len({one.keys for one in made}) == 4
    assert len({one.items for one in made}) == 1
    assert not knowledge.filled(made[0]).is_whole
    knowledge.identities.put(made[0].keys[0], KNOWN)
    assert knowledge.filled(made[0]).is_whole


def test_knowledge_without_a_clock_never_gives_a_request_up() -> None:
    knowledge = MediaKnowledge(b"key")
    knowledge.learning.begin("w", prompt(HEAD, CAT, ASK))
    assert knowledge.learning.listens("w")
