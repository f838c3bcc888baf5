"""Reads the files without which the router does not start, as it does itself, to check them.

What reads them is imported only if the configuration names such a file.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.base.errors import StartError
from extproc.base.tokenizer_files import TokenizerFiles
from extproc.config.reader import Rule
from extproc.config.schema import Config, Model

if TYPE_CHECKING:
    from extproc.tokenizing.tokens import ChatTemplates


def _certificates(config: Config) -> Iterator[str]:
    tls = config.extproc.tls
    if tls is not None:
        from extproc.serving.certificates import Certificates

        yield from _fault_of(lambda: Certificates(tls))


def _secrets_of_sharing(config: Config) -> Iterator[str]:
    sharing = config.sharing
    if sharing is not None:
        from extproc.sharing.sharing import reporter_of

        yield from _fault_of(lambda: reporter_of(sharing))


def _secret_of_tenants(config: Config) -> Iterator[str]:
    isolation = config.isolation
    if isolation is not None:
        from extproc.base.secret_file import secret_in

        yield from _fault_of(lambda: secret_in("isolation.secret_file", isolation.secret_file))


def _settings_of_tokenizers(config: Config) -> Iterator[str]:
    for number, model in enumerate(config.models):
        files = _files_of(model)
        if files is not None:
            from extproc.tokenizing.token_files import SettingsFiles

            try:
                SettingsFiles.read(files.directory)
            except (OSError, ValueError) as error:
                yield f"models[{number}].tokenizer: {error}"


def _templates_of_models(config: Config) -> Iterator[str]:
    for number, model in enumerate(config.models):
        try:
            templates_of(model)
        except (OSError, ValueError) as error:
            yield f"models[{number}].chat_template: {error}"


def _files_of(model: Model) -> TokenizerFiles | None:
    """Returns the files of a model's tokenizer; None if it names none that are there."""
    if not isinstance(model.tokenizer, str):
        return None
    try:
        return TokenizerFiles.find(model.tokenizer)
    except (OSError, ValueError):
        return None  # which is another fault


def templates_of(model: Model) -> "ChatTemplates | None":
    """Returns the chat templates of a model; None if it needs none, or its files are missing.

    Raises:
        OSError, ValueError: one cannot be read, or is none.
    """
    files = _files_of(model)
    if files is None:
        return None
    from extproc.tokenizing.families import family_of
    from extproc.tokenizing.token_files import object_in
    from extproc.tokenizing.tokens import load

    config = object_in(files.directory / "config.json")
    if family_of(config, files.chosen(model.tokenizer_mode).name).render is not None:
        return None
    override = None if model.chat_template is None else Path(model.chat_template)
    return load(files.directory, {}, override)


def template_notes(config: Config) -> Iterator[str]:
    """Yields a note for each model whose template needs what no rendering here has."""
    for number, model in enumerate(config.models):
        templates = templates_of(model)
        if templates is not None and templates.lacking:
            from extproc.tokenizing.tokens import lacking_in_words

            yield f"models[{number}].tokenizer: {lacking_in_words(templates.lacking)}"


def _fault_of(read: Callable[[], object]) -> Iterator[str]:
    """Yields why the router would not start with what this reads."""
    try:
        read()
    except StartError as error:
        yield str(error)


NEEDED_FILES: tuple[Rule, ...] = (
    _certificates,
    _secrets_of_sharing,
    _secret_of_tenants,
    _settings_of_tokenizers,
    _templates_of_models,
)
