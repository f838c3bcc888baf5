"""Which configured model a name in a request stands for."""

from collections.abc import Sequence
from typing import NamedTuple

from extproc.config import Model


class Served(NamedTuple):
    """A model, and the adapter on it if the name was one."""

    model: str
    lora: str | None


class Models:
    """The names that requests may use."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._default = models[0].name
        self._only = len(models) == 1
        self._names: dict[str, Served] = {}
        for model in models:
            for name in (model.name, *model.aliases):
                self._names[name] = Served(model.name, None)
            for adapter in model.lora:
                self._names[adapter] = Served(model.name, adapter)

    @property
    def default(self) -> str:
        """The model whose workers get what names no model that is known: the first."""
        return self._default

    def find(self, name: str | None) -> Served | None:
        """What a request's model stands for; engines take a request without one as their own."""
        if not name:
            return Served(self._default, None) if self._only else None
        return self._names.get(name)
