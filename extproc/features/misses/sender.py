"""Whose requests are counted together."""

from typing import NamedTuple


class Sender(NamedTuple):
    """A kind of client, with its model and tenant.

    tenant: eight hexadecimal digits, "" for none (`extproc.features.misses.naming.shown_tenant`).
    """

    model: str
    client: str
    tenant: str

    @property
    def in_words(self) -> str:
        """The client, and its tenant if it has one."""
        return f"{self.client} (tenant {self.tenant})" if self.tenant else self.client


NOBODY = Sender("", "", "")
