"""Writes another model's name into a body: what would this prompt be to that model?"""

from extproc.requests.added_fields import members
from extproc.requests.draft import read

_MODEL = b"model"


def named_for(body: bytes, model: str) -> bytes:
    """Returns a body that names this model, and no other; all else stays as it was.

    Raises:
        UnclearError: what its members are is not certain.
    """
    draft = read(body, (_MODEL,))
    for member in draft.named(_MODEL):
        draft.cut(member)
    draft.add(members({"model": model}))
    return draft.written()
