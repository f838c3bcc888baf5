"""Benchmark of conversations that engines write in code: body to ids, beside their libraries.

python benchmarks/in_code.py [--quick | --smoke] [--json FILE]
"""

import base64
import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measure import CannotRunError, Goal, Row, or_reason
from prose import KIB, Prose, body
from rows import arguments, run
from tekken import Tekken, tekken
from tokens_side import batches_of, figures_of, round_of

from extproc.config.schema import Model
from extproc.requests.dialect import NEWEST
from extproc.requests.request import CHAT_PATH, parse
from extproc.tokenizing.split_patterns import KIMI
from extproc.tokenizing.tokens import Tokenizer

METHOD = """\
How: medians (least-most) of rounds, contestants in turn within a round, after one that does not
count; garbage collector off. A cost is the CPU time of all threads, or elapsed time where that is
less. Ours is from the body to the ids: JSON, conversation, ids. The reference is the engine's
library for one conversation that is parsed already: Mistral's own, and for Kimi tiktoken alone on
its whole text, without the model's own code around it. All ids are compared before.
A next turn adds an answer of 2,400 characters and a question of 400.
"""

SIZE = 32 * KIB
COUNT = 4
FIRST_SIGHT_GOAL = Goal(1.5, "<= 1.5x")
NEXT_TURN_GOAL = Goal(0.01, "<= 1 %")
FULL_ROUNDS, QUICK_ROUNDS, SMOKE_ROUNDS = 25, 7, 1

Messages = list[dict[str, str]]
# Returns the ids of a conversation.
Render = Callable[[Messages], list[int]]

_KIMI_CODE = f"""
class TikTokenTokenizer:
    num_reserved_special_tokens = 256
    pat_str = {KIMI!r}

    def encode(self, text):
        TIKTOKEN_MAX_ENCODE_CHARS = 400_000
        MAX_NO_WHITESPACES_CHARS = 25_000
"""
_KIMI_TEMPLATE = """\
{% for message in messages %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>\
{{ message.content }}<|im_end|>{% endfor %}<|im_assistant|>assistant<|im_middle|>"""
_KIMI_NAMES = ("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")


class Ours:
    """KVSteer's path from a body to ids."""

    def __init__(self, directory: Path) -> None:
        found = Tokenizer.load(Model("m", tokenizer=str(directory)))
        assert found is not None
        self._tokenizer = found

    def ids(self, request: bytes) -> Any:
        """Returns the ids of the conversation in a body."""
        (prompt,) = parse(CHAT_PATH, request, lambda _: NEWEST).prompts
        return self._tokenizer.encode(prompt)


def mistral(directory: Path) -> Render:
    """Writes a model of Mistral's, and returns its library's own render."""
    try:
        library = importlib.import_module("mistral_common.tokens.tokenizers.mistral")
        requests = importlib.import_module("mistral_common.protocol.instruct.request")
    except ImportError:
        raise CannotRunError("no library of Mistral's: pip install mistral_common") from None
    data = Path(importlib.import_module("mistral_common").__file__ or "").parent / "data"
    file = directory / "tekken.json"
    shutil.copy(max(data.glob("tekken_*.json")), file)
    tokenizer = library.MistralTokenizer.from_file(str(file))

    def render(messages: Messages) -> list[int]:
        request = requests.ChatCompletionRequest.from_openai(messages=messages)
        return list(tokenizer.encode_chat_completion(request).tokens)

    return render


def kimi(directory: Path) -> Render:
    """Writes a model with Kimi's code and template, and returns tiktoken on its text."""
    try:
        library = importlib.import_module("tiktoken")
    except ImportError:
        raise CannotRunError("no tiktoken: pip install tiktoken") from None
    vocabulary: Tekken = tekken()
    first = len(vocabulary.ranks)
    special = {name: first + place for place, name in enumerate(_KIMI_NAMES)}
    lines = [f"{base64.b64encode(one).decode()} {n}" for one, n in vocabulary.ranks.items()]
    named = {str(one): {"content": name} for name, one in special.items()}
    for name, content in {
        "tiktoken.model": "\n".join(lines),
        "tokenization_kimi.py": _KIMI_CODE,
        "chat_template.jinja": _KIMI_TEMPLATE,
        "tokenizer_config.json": json.dumps({"added_tokens_decoder": named}),
    }.items():
        (directory / name).write_text(content)
    encoding = library.Encoding(
        "kimi", pat_str=KIMI, mergeable_ranks=vocabulary.ranks, special_tokens=special
    )

    def render(messages: Messages) -> list[int]:
        return list(encoding.encode("".join(_kimi_text(messages)), allowed_special="all"))

    return render


def _kimi_text(messages: Messages) -> Iterator[str]:
    for one in messages:
        yield f"<|im_{one['role']}|>{one['role']}<|im_middle|>{one['content']}<|im_end|>"
    yield "<|im_assistant|>assistant<|im_middle|>"


MODELS = {"Mistral": (mistral, "mistral-common"), "Kimi": (kimi, "tiktoken alone")}


def section(model: str, rounds: int) -> list[Row]:
    """Returns the rows of one model: first sights and next turns of 32 KB."""
    make, against = MODELS[model]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        render = or_reason(partial(make, directory))
        titles = [
            f"{model}, {what}, 32 KB / {against} (us)" for what in ("first sight", "next turn")
        ]
        goals = [FIRST_SIGHT_GOAL, NEXT_TURN_GOAL]
        if isinstance(render, str):
            return [
                Row(title, render, render, goal) for title, goal in zip(titles, goals, strict=True)
            ]
        ours, prose = Ours(directory), Prose(5)
    for _ in range(5):
        chat = prose.turns(4 * KIB)
        assert ours.ids(body(chat)).tolist() == render(chat), model
    chats = batches_of(partial(prose.turns, SIZE), rounds, COUNT)
    longer = [[[*chat, prose.answer(), prose.question()] for chat in batch] for batch in chats]
    rows = []
    for title, goal, asked in zip(titles, goals, (chats, longer), strict=True):
        bodies = [[body(chat) for chat in batch] for batch in asked]
        contestants = {
            "ours": round_of(ours.ids, bodies),
            "reference": round_of(render, asked),
        }
        figures = figures_of(rounds, contestants, COUNT)
        rows.append(Row(title, figures["ours"], figures["reference"], goal))
    return rows


def main() -> None:
    """Runs all models, or one of them."""
    parser = arguments("Benchmark of conversations written in code.", "fewer rounds")
    parser.add_argument("--only", choices=MODELS, help="one model only")
    with run(parser, METHOD) as one:
        rounds = one.amount(SMOKE_ROUNDS, QUICK_ROUNDS, FULL_ROUNDS)
        for model in MODELS:
            if one.options.only in (None, model):
                print(f"measuring: {model}", flush=True)
                one.add(section(model, rounds))


if __name__ == "__main__":
    main()
