"""The configuration: one frozen object, validated once; docs/configuration.md lists every key.

`extproc.config.reader` makes it from YAML; a test compares the documentation with the fields here.
"""

from extproc.config.schema import (
    AUTO,
    POLICIES,
    SERVICES,
    Accounting,
    Admin,
    CacheAware,
    Config,
    Cost,
    Discovery,
    DnsName,
    Envoy,
    EventPorts,
    Events,
    ExtProc,
    FoundWorker,
    Kubernetes,
    Log,
    Metrics,
    Model,
    Policy,
    PrefixCache,
    RemoteTokenizer,
    RouterTls,
    Tls,
    Worker,
    WorkerEvents,
)

__all__ = [
    "AUTO", "POLICIES", "SERVICES", "Accounting", "Admin", "CacheAware", "Config", "Cost",
    "Discovery", "DnsName", "Envoy", "EventPorts", "Events", "ExtProc", "FoundWorker", "Kubernetes",
    "Log", "Metrics", "Model", "Policy", "PrefixCache", "RemoteTokenizer",
    "RouterTls", "Tls", "Worker", "WorkerEvents",
]  # fmt: skip
