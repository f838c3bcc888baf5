"""Values of JSON as the engines' request models read them: pydantic's lax mode."""

from extproc.base.errors import RequestError

# The texts that are taken for a boolean, whatever their case.
_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
_FALSE = frozenset(("0", "off", "f", "false", "n", "no"))


def flag(value: object) -> bool | None:
    """Returns a field that is a boolean or null.

    Raises:
        RequestError: the engine refuses it.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return value == 1
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise RequestError("bad_request")


def text(value: object) -> str | None:
    """Returns a field that is a text or null.

    Raises:
        RequestError: the engine refuses it.
    """
    if not isinstance(value, str | None):
        raise RequestError("bad_request")
    return value


def integer(value: object) -> int | None:
    """Returns a field that is an integer or null.

    Raises:
        RequestError: the engine refuses it.
    """
    if value is None:
        return None
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
        return int(value)
    raise RequestError("bad_request")
