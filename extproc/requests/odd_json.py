"""Reads a body as Python's json does, where a stricter decoder refuses it.

The Python front ends of vLLM (0.33, Starlette's `Request.json`), TensorRT-LLM and older SGLang
read bodies with Python's json. Beyond RFC 8259 it takes NaN, Infinity, -Infinity and numbers out of
range, halves of surrogate pairs (as escapes, or as bytes), a byte order mark, UTF-16 and UTF-32. Of
a name that occurs twice the later value counts, whatever the earlier one was. Some clients send
such bodies, and these engines answer them.

A body is read again by this only where msgspec refused it, so usual ones cost no more. It is
written as JSON in UTF-8, so that all other code reads it as any body: what such JSON cannot say has
a stand-in, which `restored` takes out of what was made of it.
"""

import codecs
import json
import math
import re
from collections.abc import Collection
from operator import is_
from typing import Any, TypeVar

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.costly_json import refuse_costly

# Larger bodies are not read: the interpreter is held for some 25 ms for each MiB of escapes.
MAX_BYTES = 1024 * 1024

# Numbers that no client writes by chance: each stands for one that JSON cannot say. They are finite
# and no integers, so they are refused where the engine refuses these.
_STAND_INS = {
    "NaN": 1.680436920721e-290,
    "Infinity": 1.925013366157e-290,
    "-Infinity": 1.377498021563e-290,
}
_NUMBERS = {stand_in: float(text) for text, stand_in in _STAND_INS.items()}
_WRITTEN = re.compile("|".join([re.escape(repr(one)) for one in _NUMBERS]))

# A half of a surrogate pair; the letters of the last private plane that stand for them.
_HALF = re.compile("[\ud800-\udfff]")
_HALVES = range(0xD800, 0xE000)
_LETTERS = range(0x10F000, 0x10F800)
_LETTER = re.compile(f"[{chr(_LETTERS[0])}-{chr(_LETTERS[-1])}]")
_TO_LETTERS = dict(zip(_HALVES, _LETTERS, strict=True))

_Made = TypeVar("_Made")


class OddBody(bytes):
    """A body that was odd, as JSON in UTF-8 with stand-ins."""

    __slots__ = ()


def decoded(body: bytes) -> dict[str, Any]:
    """Returns a body's object as Python's json reads it.

    It holds up other threads for as long as that takes; `refuse_costly` bounds it.

    Raises:
        RequestError: Python's json refuses it (bad_json), it is no object (bad_request), it is too
            large or too costly (too_many_*), or too deeply nested to know (odd_json).
    """
    return _object(_text(body))


def object_in(text: str) -> dict[str, Any] | None:
    """Returns the object that Python's json reads in a text within a body, None if it is none.

    Raises:
        ValueError: a number has too many digits.
        RequestError: there is a half of a surrogate pair, or it is too deeply nested (odd_json).
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    except RecursionError:
        raise RequestError("odd_json") from None
    if not isinstance(found, dict):
        return None
    if _HALF.search(_written(found)):
        raise RequestError("odd_json")
    return found


def encoded(value: Any) -> bytes:
    """Returns a value as JSON in UTF-8, which Python's json reads as the same value.

    NaN and its like are written as Python's json writes them, halves of surrogate pairs as the
    three bytes that UTF-8 would have for them.

    Raises:
        RequestError: it is too deeply nested (odd_json).
    """
    return _written(value).encode("utf-8", "surrogatepass")


def rewritten(body: bytes) -> OddBody:
    """Returns what Python's json reads in a body, as JSON in UTF-8 that any decoder reads alike.

    Raises:
        RequestError: as `decoded`; or it has letters that are needed as stand-ins (odd_json).
    """
    members = _object(_text(body), parse_float=_finite, parse_constant=_STAND_INS.__getitem__)
    written = _written(members)
    if _HALF.search(written):
        if _LETTER.search(written):
            raise RequestError("odd_json")
        written = written.translate(_TO_LETTERS)
    return OddBody(written.encode())


def ends_in_utf8(start: bytes, end: bytes) -> tuple[bytes, bytes]:
    """Returns both ends of a body in UTF-8, if it is in UTF-16 or UTF-32; else as they are.

    start, end: of a length that is divided by four.
    """
    encoding: str = json.detect_encoding(start)
    if encoding.startswith("utf-8"):
        return start, end
    if encoding in ("utf-16", "utf-32"):  # it has a byte order mark
        encoding += "-le" if start[0] == codecs.BOM_UTF16_LE[0] else "-be"
    return _utf8(start, encoding), _utf8(end, encoding)


def _utf8(text: bytes, encoding: str) -> bytes:
    return text.decode(encoding, "replace").encode()


def restored(made: _Made) -> _Made:
    """Returns what was made of an `OddBody`, with the numbers for which there are stand-ins.

    Raises:
        RequestError: it has a half of a surrogate pair (odd_json): engines refuse it in a prompt.
    """
    try:
        restored: _Made = _restored(made)
    except RecursionError:
        raise RequestError("odd_json") from None
    return restored


def _text(body: bytes) -> str:
    if len(body) > MAX_BYTES:
        raise RequestError("too_many_bytes")
    try:
        return body.decode(json.detect_encoding(body), "surrogatepass")
    except UnicodeDecodeError:
        raise RequestError("bad_json") from None


def _object(text: str, **numbers: Any) -> dict[str, Any]:
    refuse_costly(text.encode("utf-8", "surrogatepass"))
    try:
        found = json.loads(text, **numbers)
    except RecursionError:  # engines on newer Pythons read more
        raise RequestError("odd_json") from None
    except ValueError:
        raise RequestError("bad_json") from None
    if not isinstance(found, dict):
        raise RequestError("bad_request")
    return found


def _written(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, check_circular=False, separators=(",", ":"))
    except RecursionError:
        raise RequestError("odd_json") from None


def _finite(written: str) -> float:
    number = float(written)
    if math.isinf(number):
        return _STAND_INS["Infinity" if number > 0 else "-Infinity"]
    return number


def _restored(made: Any) -> Any:
    """Returns the same object if no stand-in is in it."""
    if isinstance(made, str):
        return _restored_text(made)
    if isinstance(made, float):
        return _NUMBERS.get(made, made)
    if isinstance(made, dict):
        names, values = _restored_all(made), _restored_all(made.values())
        if names or values:
            return dict(zip(names or made, values or made.values(), strict=True))
    elif isinstance(made, list | tuple):
        values = _restored_all(made)
        if values:
            return values if isinstance(made, list) else tuple(values)
    elif isinstance(made, msgspec.Struct):
        values = _restored_all(msgspec.structs.astuple(made))
        if values:
            return type(made)(*values)
    return made


def _restored_all(made: Collection[Any]) -> list[Any] | None:
    """Returns all of these, None if they are the same objects."""
    values = [_restored(value) for value in made]
    return None if all(map(is_, values, made)) else values


def _restored_text(text: str) -> str:
    """Returns a text in which numbers may have been written, such as the arguments of a call."""
    if _LETTER.search(text):
        raise RequestError("odd_json")
    if _WRITTEN.search(text):
        return _WRITTEN.sub(lambda found: json.dumps(_NUMBERS[float(found[0])]), text)
    return text
