"""Values as SGLang's front end reads them: its JSON parser, then its request models.

Source: SGLang 0.5.17 to 0.5.23, ORJSONRequest in srt/entrypoints/http_server.py, and orjson, which
also reads the arguments of tool calls in earlier releases; pydantic's lax mode.
"""

from typing import Any

from extproc.base.errors import RequestError

_LARGEST, _SMALLEST = 2**64 - 1, -(2**63)

# The texts that pydantic takes for a boolean, whatever their case.
_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
_FALSE = frozenset(("0", "off", "f", "false", "n", "no"))


def as_read(value: Any) -> Any:
    """Returns a value of JSON in which integers of more than 64 bits are floats."""
    return value if _is_narrow(value) else _narrow(value)


def _is_narrow(value: object) -> bool:
    if type(value) is int:
        return _SMALLEST <= value <= _LARGEST
    if isinstance(value, dict):
        return all(map(_is_narrow, value.values()))
    return not isinstance(value, list) or all(map(_is_narrow, value))


def _narrow(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _narrow(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(_narrow, value))
    return value if _is_narrow(value) else _as_float(value)


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise RequestError("bad_request") from None  # the engine refuses an infinite number


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
    if isinstance(value, int | float) and value == int(value):
        return int(value)
    if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
        return int(value)
    raise RequestError("bad_request")
