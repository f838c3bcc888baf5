"""The tokenizer of each model: from its files, or the workers that are asked."""

import functools

from extproc.config import Config
from extproc.config import RemoteTokenizer as RemoteTokenizerOptions
from extproc.metrics import Metrics
from extproc.tokenizing.remote_tokenizer import RemoteTokenizer
from extproc.tokenizing.tokens import Tokenizer
from extproc.workers.workers import Workers


def load_tokenizers(config: Config) -> dict[str, Tokenizer]:
    """The tokenizer of every model that has one in files.

    Raises:
        StartError: one cannot be loaded.
    """
    local = [model for model in config.models if isinstance(model.tokenizer, str)]
    loaded = {model.name: Tokenizer.load(model) for model in local}
    return {name: tokenizer for name, tokenizer in loaded.items() if tokenizer is not None}


def remote_tokenizers(
    config: Config, workers: Workers, metrics: Metrics
) -> dict[str, RemoteTokenizer]:
    """The tokenizer of every model whose workers are asked for tokens; they are to be closed."""
    made: dict[str, RemoteTokenizer] = {}
    for model in config.models:
        options = model.tokenizer
        if isinstance(options, RemoteTokenizerOptions) and options.remote:
            endpoints = functools.partial(workers.endpoints, model.name)
            count = functools.partial(metrics.count_question, model.name)
            one = made[model.name] = RemoteTokenizer(model, options, endpoints, count)
            metrics.add_tokenizer(model.name, one.away)
            workers.gone.append(functools.partial(_forget, one))
    return made


def _forget(tokenizer: RemoteTokenizer, _name: str, endpoint: str) -> None:
    tokenizer.forget(endpoint)
