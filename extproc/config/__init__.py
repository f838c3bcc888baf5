"""The configuration: one frozen object, validated once; docs/configuration.md lists every key.

`extproc.config.reader` makes it from YAML; a test compares the documentation with the fields here.
"""

from extproc.config.envoy import Envoy
from extproc.config.listeners import Admin, Events, ExtProc, Log, Metrics
from extproc.config.models import Model, RemoteTokenizer
from extproc.config.policy import POLICIES, CacheAware, Cost, Policy, PrefixCache
from extproc.config.whole import Config
from extproc.config.workers import AUTO, SERVICES, Worker, WorkerEvents

__all__ = [
    "AUTO", "POLICIES", "SERVICES", "Admin", "CacheAware", "Config", "Cost", "Envoy", "Events",
    "ExtProc", "Log", "Metrics", "Model", "Policy", "PrefixCache", "RemoteTokenizer", "Worker",
    "WorkerEvents",
]  # fmt: skip
