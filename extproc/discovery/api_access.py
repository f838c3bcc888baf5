"""How a Kubernetes API server is reached, and as whom: by a kubeconfig, or as our own pod.

What a kubeconfig's command or token file told expires. It is asked for again when it is about to,
or when the server refuses it (401), as client-go does with credential plugins
(https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins).
The token of our own pod is read again by the client itself.
"""

import asyncio
import datetime as dt
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import aiohttp

from extproc.discovery.list_watch import Ask
from extproc.errors import DiscoveryError

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

# What the client logs of a failure, our fault says.
logging.getLogger("kubernetes_asyncio").addHandler(logging.NullHandler())

# A credential is renewed so long before it expires.
EARLY = dt.timedelta(seconds=60)

# The kubeconfig's command is waited for so long.
COMMAND_SECONDS = 60.0

_UNAUTHORIZED = 401

# What a kubeconfig says: how the server is reached, and until when, if it tells.
_Read: TypeAlias = "tuple[Configuration, dt.datetime | None]"


class ApiAccess:
    """Reaches one API server; kubeconfig: a file's name, None for our own pod's service account."""

    def __init__(self, kubeconfig: str | None) -> None:
        self._kubeconfig = kubeconfig
        self._expires_at: dt.datetime | None = None
        self._refused: str | None = None
        self._renewing = asyncio.Lock()
        self._reading: asyncio.Task[_Read] | None = None

    async def reach(self) -> "Configuration":
        """The configuration of a client, whose credentials stay fresh.

        Raises:
            DiscoveryError: there is none.
        """
        from kubernetes_asyncio import client, config  # noqa: PLC0415 - an extra

        if self._kubeconfig is not None:
            configuration = await self._load()
            configuration.refresh_api_key_hook = self._renew_if_due
            return configuration
        configuration = client.Configuration()
        try:
            config.load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
        except Exception as error:
            raise _not_known(error) from error
        return configuration

    def asking(self, ask: Ask) -> Ask:
        """Asks once more, with a new credential, where the server refuses the one that we have."""

        async def ask_as_known(**options: Any) -> aiohttp.ClientResponse:  # noqa: ANN401 - the client's own
            response = await ask(**options)
            if response.status != _UNAUTHORIZED or self._kubeconfig is None:
                return response
            self._refused = response.request_info.headers.get("Authorization")
            response.close()
            return await ask(**options)

        return ask_as_known

    async def _renew_if_due(self, configuration: "Configuration") -> None:
        """Asked before each question that shows a token."""
        async with self._renewing:
            now = dt.datetime.now(dt.UTC)
            is_over = self._expires_at is not None and now >= self._expires_at - EARLY
            if is_over or configuration.api_key["BearerToken"] == self._refused:
                await self._renew(configuration)

    async def _renew(self, configuration: "Configuration") -> None:
        configuration.api_key = (await self._load()).api_key
        self._refused = None

    async def _load(self) -> "Configuration":
        """What the kubeconfig says now.

        Its command cannot be ended by us: while one hangs, no other is begun.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(_read(self._kubeconfig))
        done, _ = await asyncio.wait((self._reading,), timeout=COMMAND_SECONDS)
        if not done:
            raise _not_known(f"its command takes longer than {COMMAND_SECONDS:g} s")
        self._reading = None
        try:
            configuration, self._expires_at = done.pop().result()
        except Exception as error:  # the loaders raise what they like
            raise _not_known(error) from error
        return configuration


async def _read(kubeconfig: str | None) -> _Read:
    from kubernetes_asyncio import client, config  # noqa: PLC0415 - an extra

    configuration = client.Configuration()
    loader = await config.load_kube_config(
        config_file=kubeconfig, client_configuration=configuration
    )
    return configuration, getattr(loader, "exec_plugin_expiry", None)


def own_namespace() -> str:
    """The namespace of our own pod, or `default`."""
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return "default"


def _not_known(reason: object) -> DiscoveryError:
    words = " ".join(str(reason).split())[:200]
    return DiscoveryError(f"the API server is not known: {words}")
