"""The sources that the configuration names."""

from extproc.config import Config
from extproc.discovery.dns_names import DnsNames
from extproc.discovery.kubernetes import KubernetesPods
from extproc.discovery.sources import Source
from extproc.discovery.worker_file import WorkerFile


def sources_of(config: Config) -> list[Source]:
    """All of them, in the order in which they take precedence.

    Raises:
        StartError: one needs an extra that is not installed.
    """
    options = config.discovery
    sources: list[Source] = []
    if options.file is not None:
        sources.append(WorkerFile(options.file, config))
    sources += [DnsNames(name) for name in options.dns]
    if options.kubernetes is not None:
        sources.append(KubernetesPods(options.kubernetes, config))
    return sources
