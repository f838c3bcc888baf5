"""What the doctor works with."""

from collections.abc import Mapping
from typing import NamedTuple

from extproc.config import Config
from extproc.doctor.web_client import WebClient
from extproc.tokenizing.tokens import Tokenizer


class Means(NamedTuple):
    """tokenizers: by model, those in files. seconds: for each question and each wait. probes:
    whether completions are asked for to provoke events, and queues are drained."""

    config: Config
    web: WebClient
    tokenizers: Mapping[str, Tokenizer]
    seconds: float
    probes: bool
