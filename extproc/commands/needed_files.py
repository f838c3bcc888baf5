"""Reads the files without which the router does not start, as it does itself, to check them.

What reads them is imported only if the configuration names such a file.
"""

from collections.abc import Iterator

from extproc.base.errors import StartError
from extproc.config.reader import Rule
from extproc.config.schema import Config


def _certificates(config: Config) -> Iterator[str]:
    if config.extproc.tls is None:
        return
    from extproc.serving.certificates import Certificates

    try:
        Certificates(config.extproc.tls)
    except StartError as error:
        yield str(error)


def _secrets_of_sharing(config: Config) -> Iterator[str]:
    if config.sharing is None:
        return
    from extproc.sharing.sharing import telling_of

    try:
        telling_of(config.sharing)
    except StartError as error:
        yield str(error)


def _secret_of_tenants(config: Config) -> Iterator[str]:
    if config.isolation is None:
        return
    from extproc.base.secret_file import secret_in

    try:
        secret_in("isolation.secret_file", config.isolation.secret_file)
    except StartError as error:
        yield str(error)


NEEDED_FILES: tuple[Rule, ...] = (_certificates, _secrets_of_sharing, _secret_of_tenants)
