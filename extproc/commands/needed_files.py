"""Reads the files without which the router does not start, as it does itself, to check them.

What reads them is imported only if the configuration names such a file.
"""

from collections.abc import Callable, Iterator

from extproc.base.errors import StartError
from extproc.config.reader import Rule
from extproc.config.schema import Config


def _certificates(config: Config) -> Iterator[str]:
    tls = config.extproc.tls
    if tls is not None:
        from extproc.serving.certificates import Certificates

        yield from _fault_of(lambda: Certificates(tls))


def _secrets_of_sharing(config: Config) -> Iterator[str]:
    sharing = config.sharing
    if sharing is not None:
        from extproc.sharing.sharing import telling_of

        yield from _fault_of(lambda: telling_of(sharing))


def _secret_of_tenants(config: Config) -> Iterator[str]:
    isolation = config.isolation
    if isolation is not None:
        from extproc.base.secret_file import secret_in

        yield from _fault_of(lambda: secret_in("isolation.secret_file", isolation.secret_file))


def _fault_of(read: Callable[[], object]) -> Iterator[str]:
    """Yields why the router would not start with what this reads."""
    try:
        read()
    except StartError as error:
        yield str(error)


NEEDED_FILES: tuple[Rule, ...] = (_certificates, _secrets_of_sharing, _secret_of_tenants)
