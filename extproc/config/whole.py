"""The whole configuration."""

from dataclasses import dataclass

from extproc.config.accounting import Accounting
from extproc.config.discovery import Discovery
from extproc.config.envoy import Envoy
from extproc.config.key import key
from extproc.config.listeners import Admin, Events, ExtProc, Log, Metrics
from extproc.config.models import Model
from extproc.config.policy import Policy
from extproc.config.workers import Worker


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration."""

    extproc: ExtProc = key("the gRPC server that Envoy talks to", ExtProc)
    admin: Admin = key("the operator's HTTP server", Admin)
    metrics: Metrics = key("the HTTP server for scrapers", Metrics)
    log: Log = key("what is logged", Log)
    log_prompts: bool = key("true puts prompt text into debug logs", default=False)
    events: Events = key("whether the workers' events are used", Events)
    models: tuple[Model, ...] = key("the models served, at least one", ())
    workers: tuple[Worker, ...] = key(
        "the engine servers; at least one, unless discovery finds them", ()
    )
    discovery: Discovery = key("where workers are found that are not listed", Discovery)
    policy: Policy = key("how a worker is picked", Policy)
    accounting: Accounting = key("what is read of responses", Accounting)
    envoy: Envoy = key("what `kvsteer envoy` prints", Envoy)

    def model_of(self, worker: Worker) -> str:
        """The name of the model that a worker serves."""
        return worker.model or self.models[0].name
