"""Rows of the token benchmark for conversations that engines render in code: body to ids.

The reference is the engine's own way, on the whole conversation: oss-harmony for gpt-oss, and
`tokenizers` on the prompt's text for DeepSeek V4.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measure import CannotRunError, Result, Row, or_reason
from peer_tokenizers import PEERS
from prose import KIB, Prose, body
from tokens_side import FIRST_SIGHT_GOAL, NEXT_TURN_GOAL, batches_of, figures_of, round_of

from extproc.config.schema import Model
from extproc.renderers.deepseek import ASSISTANT, BOS, EOS, USER
from extproc.renderers.harmony_format import CONTROLS
from extproc.requests.dialect import NEWEST
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.tokens import Tokenizer

Messages = Sequence[dict[str, str]]
Contestant = Callable[[Messages], object]

_SIZE, _CHATS = 32 * KIB, 4

_MODELS = {"gpt-oss": "GptOssForCausalLM", "DeepSeek V4": "DeepseekV4ForCausalLM"}


def in_code(directory: Path, rounds: int) -> list[Row]:
    """Returns the rows of first sights and next turns, by model."""
    rows = []
    for model, architecture in _MODELS.items():
        folder = _folder(directory, model, architecture)
        tokenizer = Tokenizer.load(Model(model, tokenizer=str(folder)))
        assert tokenizer is not None
        reference = or_reason(partial(_REFERENCES[model], folder))
        rows += _rows(model, partial(_ids, tokenizer), reference, rounds)
    return rows


def _folder(directory: Path, model: str, architecture: str) -> Path:
    """Writes the vocabulary as that of another model, with the control tokens of both.

    Every id has a token, as in the models' own: fastokens reads no vocabulary with gaps.
    """
    content = json.loads((directory / "tokenizer.json").read_text())
    more = {name: 200_020 + number for number, name in enumerate((BOS, EOS, USER, ASSISTANT))}
    controls = {**CONTROLS, **more}
    vocabulary = content["model"]["vocab"]
    taken = {*vocabulary.values(), *controls.values()}
    for number in set(range(max(taken))) - taken:
        vocabulary[f"\0{number}"] = number  # no text has such a token: none of its bytes is so
    for name, number in controls.items():
        vocabulary[name] = number
        token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": number, "content": name, "special": True, **token})
    folder = directory / model
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return folder


def _rows(
    model: str, ours: Callable[[bytes], object], reference: Contestant | str, rounds: int
) -> list[Row]:
    prose = Prose(5)
    first = batches_of(partial(prose.turns, _SIZE), rounds, _CHATS)
    known = batches_of(partial(prose.turns, _SIZE), rounds, _CHATS)
    for batch in known:
        for chat in batch:
            ours(body(chat))
    later = [[[*chat, prose.answer(), prose.question()] for chat in batch] for batch in known]
    rows = []
    for what, chats, goal in (
        ("first sight", first, FIRST_SIGHT_GOAL),
        ("next turn", later, NEXT_TURN_GOAL),
    ):
        bodies = [[body(chat) for chat in batch] for batch in chats]
        contestants = {"ours": round_of(ours, bodies)}
        if not isinstance(reference, str):
            contestants["reference"] = round_of(reference, chats)
        figures: dict[str, Result] = {**figures_of(rounds, contestants, _CHATS)}
        base = figures.get("reference", str(reference))
        name = f"{what}, body to ids, 32 KB, {model}, ours / the engine's own way (us)"
        rows.append(Row(name, figures["ours"], base, goal))
    return rows


def _ids(tokenizer: Tokenizer, request: bytes) -> object:
    (prompt,) = parse(CHAT_PATH, request, lambda _: NEWEST).prompts
    return tokenizer.encode(prompt)


def _harmony(_: Path) -> Contestant:
    """Returns what vLLM does with oss-harmony.

    Raises:
        CannotRunError: it is not installed.
    """
    try:
        library: Any = importlib.import_module("openai_harmony")
    except ImportError:
        raise CannotRunError("pip install oss-harmony") from None
    encoding = library.load_harmony_encoding("HarmonyGptOss")
    config = library.RenderConversationConfig(auto_drop_analysis=False)
    roles = {"user": library.Role.USER, "assistant": library.Role.ASSISTANT}

    def render(messages: Messages) -> object:
        turns = [
            library.Message.from_role_and_content(roles[one["role"]], one["content"])
            for one in messages
        ]
        conversation = library.Conversation.from_messages(turns)
        return encoding.render_conversation_for_completion(
            conversation, library.Role.ASSISTANT, config=config
        )

    return render


def _whole_text(folder: Path) -> Contestant:
    """Returns what vLLM does for DeepSeek, without the writing of the text."""
    encode = PEERS["tokenizers"](folder)
    return lambda messages: encode("".join(USER + one["content"] for one in messages))


_REFERENCES: Mapping[str, Callable[[Path], Contestant]] = {
    "gpt-oss": _harmony,
    "DeepSeek V4": _whole_text,
}
