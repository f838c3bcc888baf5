"""Asks the API server whether the router may write the deletion costs of pods.

Source: authorization.k8s.io/v1, SelfSubjectAccessReview.
"""

from typing import Any

from extproc.base.errors import DiscoveryError
from extproc.config.schema import Config
from extproc.fleet.discovery.api_access import ApiAccess
from extproc.fleet.discovery.kubernetes import own_namespace
from kvtools.doctor.findings import Finding, Subject

CHECK = "discovery"


async def visit(config: Config, seconds: float) -> list[Finding]:
    """Returns whether pods may be patched; nothing if no deletion costs are wanted.

    seconds: limit of the question.
    """
    options = config.discovery.kubernetes
    if options is None or not options.deletion_cost:
        return []
    from kubernetes_asyncio import client

    about = Subject("discovery kubernetes")
    wanted = {
        "namespace": options.namespace or own_namespace(),
        "verb": "patch",
        "resource": "pods",
    }
    try:
        configuration = await ApiAccess(options.kubeconfig).reach()
        async with client.ApiClient(configuration) as api:
            ask: Any = client.AuthorizationV1Api(api).create_self_subject_access_review
            body = {"spec": {"resourceAttributes": wanted}}
            review = await ask(body, _request_timeout=seconds)
    except (DiscoveryError, client.ApiException, OSError, TimeoutError) as error:
        says = " ".join(str(error).split()) or type(error).__name__
        return [about.note(CHECK, f"whether pods may be patched is not known: {says}")]
    if not review.status.allowed:
        says = f"pods in {wanted['namespace']} must not be patched: {review.status.reason or ''}"
        return [about.wrong("deletion-cost-forbidden", says.rstrip(": "))]
    return [about.right(CHECK, "deletion costs of pods may be written")]
