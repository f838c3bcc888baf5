"""Headers that a trusted filter before the router sets: a tenant, a class, a policy's input."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

# All values of each, by its name in lower case.
TrustedHeaders = Mapping[str, Sequence[bytes]]

NO_TRUSTED_HEADERS: TrustedHeaders = MappingProxyType({})
