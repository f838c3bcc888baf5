"""How to reach a Kubernetes API server, with credentials that expire.

A credential from a kubeconfig's command or token file is renewed shortly before it expires, if the
time is known, and when the server refuses it (401), as client-go does with credential plugins
(https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins).
The client itself re-reads the token of our own pod.
"""

import asyncio
import datetime as dt
from typing import TYPE_CHECKING, Any, TypeAlias

import aiohttp

from extproc.base.errors import DiscoveryError
from extproc.fleet.discovery.list_watch import Ask

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration

# A credential is renewed this long before it expires.
EARLY = dt.timedelta(seconds=60)

# How long to wait for the kubeconfig's command.
COMMAND_SECONDS = 60.0

_UNAUTHORIZED = 401

# What a kubeconfig contains: how to reach the server, and when the credential expires, if known.
_Read: TypeAlias = "tuple[Configuration, dt.datetime | None]"


class ApiAccess:
    """How to reach one API server, and with which credentials.

    kubeconfig: the name of a file; None for the service account of our own pod. command_seconds:
    how long its command may take.
    """

    def __init__(self, kubeconfig: str | None, command_seconds: float = COMMAND_SECONDS) -> None:
        self._kubeconfig = kubeconfig
        self.command_seconds = command_seconds
        self._expires_at: dt.datetime | None = None
        self._refused: str | None = None
        self._renewing = asyncio.Lock()
        self._reading: asyncio.Task[_Read] | None = None

    async def reach(self) -> "Configuration":
        """Returns the configuration of a client; its credentials are renewed as they expire.

        Raises:
            DiscoveryError: it cannot be loaded.
        """
        from kubernetes_asyncio import client, config

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
        """Returns `ask` as a function that, if refused, asks once more with a new credential."""

        async def ask_as_known(**options: Any) -> aiohttp.ClientResponse:
            response = await ask(**options)
            if response.status != _UNAUTHORIZED or self._kubeconfig is None:
                return response
            self._refused = response.request_info.headers.get("Authorization")
            response.close()
            return await ask(**options)

        return ask_as_known

    async def _renew_if_due(self, configuration: "Configuration") -> None:
        """Renews the token if that is due; the client calls this before each request."""
        async with self._renewing:
            now = dt.datetime.now(dt.UTC)
            is_over = self._expires_at is not None and now >= self._expires_at - EARLY
            if is_over or configuration.api_key["BearerToken"] == self._refused:
                await self._renew(configuration)

    async def _renew(self, configuration: "Configuration") -> None:
        configuration.api_key = (await self._load()).api_key
        self._refused = None

    async def _load(self) -> "Configuration":
        """Returns the kubeconfig's current configuration.

        Its command cannot be stopped from here, so while one hangs, no other is started.

        Raises:
            DiscoveryError: it cannot be loaded, or its command takes too long.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(_read(self._kubeconfig))
        done, _ = await asyncio.wait((self._reading,), timeout=self.command_seconds)
        if not done:
            raise _not_known(f"its command takes longer than {self.command_seconds:g} s")
        self._reading = None
        try:
            configuration, self._expires_at = done.pop().result()
        except Exception as error:  # the loaders raise all kinds of exceptions
            raise _not_known(error) from error
        return configuration


async def _read(kubeconfig: str | None) -> _Read:
    from kubernetes_asyncio import client, config

    configuration = client.Configuration()
    loader = await config.load_kube_config(
        config_file=kubeconfig, client_configuration=configuration
    )
    return configuration, getattr(loader, "exec_plugin_expiry", None)


def _not_known(reason: object) -> DiscoveryError:
    words = " ".join(str(reason).split())[:200]
    return DiscoveryError(f"the API server is not known: {words}")
