"""Reads the TLS files that the router would serve with."""

import dataclasses
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from extproc.config import Config, Tls
from extproc.doctor.findings import About, Finding
from extproc.errors import StartError
from extproc.serving.certificates import Certificates

# Certificates that are renewed by themselves have been by then.
SOON_DAYS = 14

_DAY_SECONDS = 86_400


def visit(config: Config) -> list[Finding]:
    """What is right and wrong with the files; they are read as the router itself reads them."""
    options = config.extproc.tls
    return [] if options is None else list(_findings(About("router"), options))


def _findings(about: About, options: Tls) -> Iterator[Finding]:
    try:
        found = Certificates(dataclasses.replace(options, client_ca=None))
    except StartError as error:
        yield about.wrong("tls-certificate", str(error))
    else:
        yield _expiry(about, found.current.expires_at, time.time())
    if options.client_ca is None:
        return
    try:
        Certificates(options)
    except StartError as error:
        if str(error).startswith("extproc.tls.client_ca"):
            yield about.wrong("tls-client-ca", str(error))
    else:
        yield about.right("tls", "extproc.tls.client_ca can be read: clients need a certificate")


def _expiry(about: About, expires_at: float, now: float) -> Finding:
    day = datetime.fromtimestamp(expires_at, UTC).date()
    if expires_at <= now:
        return about.wrong("tls-expired", f"the certificate ended on {day}: nobody connects")
    days = int((expires_at - now) // _DAY_SECONDS)
    if days < SOON_DAYS:
        return about.note("tls", f"the certificate ends on {day}, in {days} days: renew it")
    return about.right("tls", f"the certificate and its key go together until {day}")
