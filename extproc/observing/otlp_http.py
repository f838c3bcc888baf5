"""Bounds the answers of an OpenTelemetry collector over HTTP: their length and their time.

The exporters' own time limit applies to each read. So a collector that sends a byte now and then
would hold an export, and the end of the router, without limit, and one that sends without end would
fill its memory.
"""

import os
from io import BytesIO
from threading import Thread
from typing import Any

import requests
from requests.adapters import HTTPAdapter

# Most bytes of an answer's body that are read. An answer counts by its status.
MAX_ANSWER_BYTES = 64 * 1024

# The time limit where the exporter gives none.
DEFAULT_SECONDS = 10.0

_CREDENTIALS = "_CREDENTIAL_PROVIDER"


class _BoundedAdapter(HTTPAdapter):
    """Sends one request at a time, each within its time limit.

    An answer that takes longer is left to its thread, and nothing else is sent until that ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asking: Thread | None = None

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,  # noqa: ARG002 - requests passes it by name
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: dict[str, str] | None = None,
    ) -> requests.Response:
        """Returns the answer to a request, with the first `MAX_ANSWER_BYTES` of its body.

        Raises:
            requests.RequestException: there is none in time, or the last request is not over.
        """
        if self._asking is not None and self._asking.is_alive():
            raise requests.Timeout("the collector has not ended its last answer")
        found: list[requests.Response | Exception] = []
        ask = super().send

        def run() -> None:
            try:
                answer = ask(request, True, timeout, verify, cert, proxies)
                raw = answer.raw
                answer.raw = BytesIO(raw.read(MAX_ANSWER_BYTES, decode_content=False))
                raw.close()
                found.append(answer)
            except Exception as error:  # noqa: BLE001 - it is raised below
                found.append(error)

        self._asking = Thread(target=run, name="otlp", daemon=True)  # it may outlive the router
        self._asking.start()
        self._asking.join(timeout if isinstance(timeout, (int, float)) else DEFAULT_SECONDS)
        if not found:
            raise requests.Timeout("the collector does not end its answer")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]


def bounded_session() -> dict[str, requests.Session]:
    """Returns the keyword argument of an exporter that bounds answers.

    It is empty if the environment names a provider of credentials, which brings its own session.
    """
    if any(name.endswith(_CREDENTIALS) for name in os.environ):
        return {}
    session = requests.Session()
    session.mount("http://", _BoundedAdapter())
    session.mount("https://", _BoundedAdapter())
    return {"session": session}
