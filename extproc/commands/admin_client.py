"""Sends requests to the admin server of a running router, for commands that show its answers."""

import json
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, TypeVar

from extproc.base.errors import StartError
from extproc.commands.terminal import plain

TIMEOUT_SECONDS = 10.0

# More than the answer for thousands of workers.
MAX_BYTES = 64 * 1024 * 1024

# More than a router's reason for a refusal.
MAX_REASON_BYTES = 64 * 1024


T = TypeVar("T")


def ask(command: str, admin: str, path: str, body: object = None) -> Any:
    """Returns the decoded answer to a GET, or to a POST of `body` as JSON if given.

    command: the command that asks; messages begin with it. admin: the server's URL, or host:port.

    Raises:
        StartError: the router cannot be asked, or refuses the question.
    """
    try:
        return json.loads(fetch(command, admin, path, body))
    except (ValueError, RecursionError) as error:
        raise _fault(command, _url(admin, path), error) from None


def ask_for(kind: type[T], command: str, admin: str, path: str) -> T:
    """Returns the answer to a GET as a type of `admin_json`, or of such; otherwise like `ask`."""
    import msgspec

    answer = fetch(command, admin, path)
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.ValidationError:
        words = f"{command}: {admin}: its answer does not match this version"
        raise StartError(plain(words)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _fault(command, _url(admin, path), error) from None


def find_decision(admin: str, name: str, value: str) -> Any:
    """Returns the last decision on a request, as GET /decisions/ID shows it.

    name, value: request_id or trace_id, and that id.

    Raises:
        StartError: the router cannot be asked, or does not keep a decision on it any more.
    """
    path = f"/decisions?{urllib.parse.urlencode({name: value})}"
    found = ask("explain", admin, path)
    try:
        number = found["decisions"][-1]["id"]
    except (KeyError, TypeError, IndexError):
        why = f"none of the last decisions has the {name} {value!r}"
        raise _fault("explain", _url(admin, "/decisions"), why) from None
    return ask("explain", admin, f"/decisions/{number}")


def fetch(
    command: str, admin: str, path: str, body: object = None, *, max_bytes: int = MAX_BYTES
) -> bytes:
    """Returns an answer of at most max_bytes without decoding it; otherwise like `ask`."""
    url = _url(admin, path)
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            answer: bytes = response.read(max_bytes + 1)
            left = response.length
    except urllib.error.HTTPError as error:
        with error:  # it is an answer, of which the rest is not read
            raise _fault(command, url, _reason_in(error)) from None
    except urllib.error.URLError as error:
        why = error.reason
        said = why.strerror if isinstance(why, OSError) else None
        if isinstance(why, ConnectionRefusedError):
            said = f"{said}: no router runs there; start it with `kvsteer serve`, or name its"
            said += " admin.listen with --admin"
        raise _fault(command, url, said or why) from None
    except (OSError, ValueError, HTTPException) as error:
        raise _fault(command, url, error) from None

    if len(answer) > max_bytes:
        raise _fault(command, url, f"the answer has more than {max_bytes} bytes")
    if left:
        raise _fault(command, url, "the answer ends too early")
    return answer


def _fault(command: str, url: str, why: object) -> StartError:
    """Returns an error for the terminal; `why` may quote whatever the server sent."""
    return StartError(plain(f"{command}: {url}: {str(why).strip()}"))


def _url(admin: str, path: str) -> str:
    return f"{'' if '://' in admin else 'http://'}{admin.rstrip('/')}{path}"


# What servers of other kinds answer to paths or methods that they do not have.
_OF_OTHERS = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)


def _reason_in(refused: urllib.error.HTTPError) -> str:
    """Returns the router's reason for a refusal, if it gave one."""
    try:
        answer = json.loads(refused.read(MAX_REASON_BYTES))
    except (OSError, ValueError, RecursionError, HTTPException):
        answer = None
    reason = answer.get("error") if isinstance(answer, dict) else None
    if reason:
        return str(reason)
    hint = "; is it a router's admin server (admin.listen)?" if refused.code in _OF_OTHERS else ""
    return f"{refused}{hint}"
