"""The headers that only the router may set: what a client sets of them is overwritten or removed.

Each is one row of `OWNED`. From its row follows what the router's answers remove, what Envoy
removes before it asks the router, which headers no key may name, and which answers are worth
keeping (`extproc.serving.stream_answers`). The values come from `Exchange._pick_answer`
(`serving/asking_exchange.py` adds its own).
"""

from collections.abc import Callable
from typing import NamedTuple

from extproc.base import headers
from extproc.config.schema import AUTO, Config
from extproc.config.sections import HEADER, MIRROR


def _everywhere(_: Config) -> bool:
    return True


class OwnedHeader(NamedTuple):
    """A header that only the router may set.

    name: in lower case. where: whether it is owned with a configuration: then each answer with a
    pick sets or removes it. is_reserved: whether Envoy removes a client's with every configuration,
    and no key may name it; else Envoy removes it where it is owned. differs: whether its value
    differs from request to request, so that an answer that has it is not worth keeping.
    """

    name: str
    where: Callable[[Config], bool] = _everywhere
    is_reserved: bool = False
    differs: bool = False


def _names_models(config: Config) -> bool:
    return len(config.models) > 1


def _mirrors(config: Config) -> bool:
    return config.disaggregation.mode == MIRROR


def _obeyed(config: Config) -> bool:
    """Returns whether a sidecar may run at a worker, which would obey a client."""
    return config.disaggregation.mode == HEADER or config.isolation is not None


def _has_classes(config: Config) -> bool:
    return config.policy.classes is not None


def _tells_warm_models(config: Config) -> bool:
    return bool(config.policy.warm_models)


# In the order in which answers remove them. The header of ranks comes last: a key names it.
OWNED = (
    OwnedHeader(headers.DESTINATION, is_reserved=True),
    OwnedHeader(headers.MODEL, _names_models, is_reserved=True),
    OwnedHeader(
        headers.PREFILLER, lambda config: _mirrors(config) or _obeyed(config), differs=True
    ),
    OwnedHeader(headers.KV_SOURCE, _obeyed, differs=True),
    OwnedHeader(headers.ENCODERS, _obeyed),
    OwnedHeader(headers.PREFILL_CLUSTER, _mirrors),
    OwnedHeader(headers.PREFILL_TAIL, _mirrors, differs=True),
    OwnedHeader(headers.PRIORITY, _has_classes),
    OwnedHeader(headers.WARM, _tells_warm_models, differs=True),
)

RESERVED = frozenset(one.name for one in OWNED if one.is_reserved)
DIFFERING = frozenset(one.name for one in OWNED if one.differs)


def owned_headers(config: Config) -> tuple[str, ...]:
    """Returns the headers that answers with a pick set or remove, each once."""
    names = [one.name for one in OWNED if one.where(config)]
    rank = rank_name(config.policy.rank_header)
    return tuple(dict.fromkeys(names if rank is None else (*names, rank)))


def removed_early(config: Config) -> tuple[str, ...]:
    """Returns the headers that Envoy removes at once: they would count while the router is down."""
    return tuple(one.name for one in OWNED if one.is_reserved or one.where(config))


def rank_name(name: str | None) -> str | None:
    """Returns the header that names ranks, in lower case; None for none. name: as configured."""
    return headers.RANK if name == AUTO else name and name.lower()
