"""The configuration: one frozen object, validated once; docs/configuration.md lists every key.

`extproc.config.reader` makes it from YAML; a test compares the documentation with the fields here.
"""

from extproc.config.accounting import Accounting
from extproc.config.discovery import Discovery, DnsName, EventPorts, FoundWorker, Kubernetes
from extproc.config.envoy import Envoy, RouterTls
from extproc.config.listeners import Admin, Events, ExtProc, Log, Metrics, Tls
from extproc.config.models import Model, RemoteTokenizer
from extproc.config.policy import POLICIES, CacheAware, Cost, Policy, PrefixCache
from extproc.config.whole import Config
from extproc.config.workers import AUTO, SERVICES, Worker, WorkerEvents

__all__ = [
    "AUTO", "POLICIES", "SERVICES", "Accounting", "Admin", "CacheAware", "Config", "Cost",
    "Discovery", "DnsName", "Envoy", "EventPorts", "Events", "ExtProc", "FoundWorker", "Kubernetes",
    "Log", "Metrics", "Model", "Policy", "PrefixCache", "RemoteTokenizer",
    "RouterTls", "Tls", "Worker", "WorkerEvents",
]  # fmt: skip
