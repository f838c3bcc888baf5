"""Kinds of clients, by the product that their user agent names first."""

import re
from collections.abc import Sequence

# So many kinds are told apart; the others count as one, as do clients that name none.
MOST_KINDS = 64
OTHERS, UNNAMED = "others", "unnamed"

# RFC 9110, User-Agent: the first product, without its version.
_PRODUCT = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,31}(?=[/ \t(;,]|\Z)")


class ClientKinds:
    """The kinds of one router's clients: the first ones that come are told apart."""

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}

    def kind_of(self, values: Sequence[bytes]) -> str:
        """Returns the kind of a client. values: of its user agent headers."""
        found = _PRODUCT.match(values[0]) if values else None
        if found is None:
            return UNNAMED
        name = found[0].lower()
        if name not in self._known and len(self._known) == MOST_KINDS:
            return OTHERS
        return self._known.setdefault(name, name.decode())
