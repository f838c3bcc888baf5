"""Values of JSON as the parser of SGLang's front end reads them.

Source: SGLang 0.5.17 to 0.5.23, ORJSONRequest in srt/entrypoints/http_server.py, and orjson, which
also reads the arguments of tool calls in earlier releases.
"""

from typing import Any

from extproc.base.errors import RequestError

_LARGEST, _SMALLEST = 2**64 - 1, -(2**63)


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
