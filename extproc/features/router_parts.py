"""What features are made of, besides their configuration."""

from typing import NamedTuple

from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.routing.claims.homes import Homes
from extproc.routing.claims.lines import Lines
from extproc.routing.load.loads import Loads
from extproc.tokenizing.prompt_tokens import PromptTokens


class RouterParts(NamedTuple):
    """The parts of one router that features use."""

    workers: Workers
    loads: Loads
    homes: Homes
    lines: Lines
    metrics: Metrics
    tokens: PromptTokens
