"""What a worker tells of itself: its model, its adapters, the size of its blocks.

Sources: `GET /v1/models` of vLLM and SGLang, where an adapter names the model that it belongs to as
its `parent`; `GET /server_info` of SGLang, with `page_size`, and `block_size` among `kv_events`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from extproc.config import Model

MODELS = "/v1/models"
SERVER_INFO = ("/server_info", "/get_server_info")

# A server that lists more than this is not read further.
MAX_LISTED = 10_000
MAX_BLOCK_SIZE = 1 << 20


class Learned(NamedTuple):
    """What is known of a worker; None is not known.

    model: the configured model that it serves. adapters: those that it lists, by name.
    """

    model: str | None = None
    adapters: frozenset[str] | None = None
    block_size: int | None = None


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    root: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Events(msgspec.Struct):
    block_size: int | None = None


class _ServerInfo(msgspec.Struct):
    page_size: int | None = None
    kv_events: _Events | None = None


def from_models(answer: bytes, models: Sequence[Model]) -> Learned:
    """What /v1/models tells; nothing if it is no such answer.

    models: those of the configuration; a worker that lists none of them serves none that we know.
    """
    try:
        cards = msgspec.json.decode(answer, type=_Cards).data[:MAX_LISTED]
    except (msgspec.DecodeError, RecursionError):
        return Learned()
    bases = [name for card in cards if not card.parent for name in (card.id, card.root)]
    names = {name: model.name for model in models for name in (model.name, *model.aliases)}
    model = next((names[name] for name in bases if name in names), None)
    return Learned(model, frozenset(card.id for card in cards if card.parent))


def block_size_in(answer: bytes) -> int | None:
    """The tokens of a block, as /server_info tells; None if it does not."""
    try:
        info = msgspec.json.decode(answer, type=_ServerInfo)
    except (msgspec.DecodeError, RecursionError):
        return None
    size = info.kv_events.block_size if info.kv_events else None
    size = size or info.page_size
    return size if size is not None and 0 < size <= MAX_BLOCK_SIZE else None
