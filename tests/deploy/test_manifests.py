"""Every overlay is valid, and its parts fit together."""

import copy
import dataclasses
import json
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from extproc.config.owned_headers import RESERVED
from extproc.config.reader import parse
from extproc.config.schema import Config
from extproc.envoy.envoy_config import IDLE_TIMEOUT
from tests.deploy.manifests import (
    KUBERNETES,
    OVERLAYS,
    ROOT,
    Manifest,
    built,
    containers,
    of_kind,
    pod_templates,
    selects,
)

# The oldest release with both sidecar containers and the sleep before a stop, no feature gate set.
OLDEST_KUBERNETES = "1.30"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in ROOT.glob("tests/deploy/schemas/*")}

overlays = pytest.mark.parametrize("overlay", OVERLAYS)
dial_tls = pytest.mark.parametrize("overlay", ["agentgateway", "nginx-gateway-fabric"])


def validate(manifest: Manifest) -> None:
    """Raises for what the API server would refuse or ignore."""
    schema = SCHEMAS.get(manifest["kind"])
    if schema is None:
        kubernetes_validate.validate(manifest, OLDEST_KUBERNETES, strict=True)
    else:
        jsonschema.validate(manifest, schema)


def strictly_typed(node: Any) -> bool:
    """Whether every object of a schema names its fields, refuses others, or has a type for them."""
    if isinstance(node, list):
        return all(map(strictly_typed, node))
    if not isinstance(node, dict):
        return True
    is_closed = node.get("additionalProperties") is not None or "properties" not in node
    return (is_closed or node.get("type") != "object") and all(map(strictly_typed, node.values()))


@overlays
def test_manifests_are_all_valid(overlay: str) -> None:
    for manifest in built(overlay):
        validate(manifest)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_misspelt_field_is_found_in_every_custom_resource(kind: str) -> None:
    (manifest, *_) = [one for overlay in OVERLAYS for one in of_kind(overlay, kind)]
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["misspelt"] = True
    with pytest.raises(jsonschema.ValidationError, match="misspelt"):
        validate(wrong)
    assert strictly_typed(SCHEMAS[kind])


@overlays
def test_routers_accept_their_configuration(overlay: str) -> None:
    texts = [one["data"].get("kvsteer.yaml") for one in of_kind(overlay, "ConfigMap")]
    (text,) = [text for text in texts if text is not None]
    config = parse(text, overlay)
    assert config.discovery.kubernetes is not None


@overlays
def test_mounted_config_maps_exist(overlay: str) -> None:
    names = {one["metadata"]["name"] for one in of_kind(overlay, "ConfigMap")}
    volumes = [one for template in pod_templates(overlay) for one in template["spec"]["volumes"]]
    mounted = {one["configMap"]["name"] for one in volumes if "configMap" in one}
    assert mounted == names


@overlays
def test_selectors_select_a_pod(overlay: str) -> None:
    templates = pod_templates(overlay)
    selectors = [one["spec"]["selector"] for one in of_kind(overlay, "Service")]
    selectors += [
        one["spec"]["selector"]["matchLabels"]
        for one in of_kind(overlay, "PodDisruptionBudget", "InferencePool")
    ]
    selectors += [
        one["spec"]["podSelector"]["matchLabels"] for one in of_kind(overlay, "NetworkPolicy")
    ]
    assert all(any(selects(labels, one) for one in templates) for labels in selectors)


@overlays
def test_service_ports_are_ports_of_their_pods(overlay: str) -> None:
    for service in of_kind(overlay, "Service"):
        labels = service["spec"]["selector"]
        (template,) = [one for one in pod_templates(overlay) if selects(labels, one)]
        offered = {port["name"] for one in containers(template) for port in one.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= offered


@overlays
def test_references_of_policies_and_routes_exist(overlay: str) -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in built(overlay)}
    for manifest in built(overlay):
        for reference in references(manifest.get("spec", {})):
            assert reference in there


def references(spec: Any) -> list[tuple[str, str]]:
    """The objects that a manifest names, as kind and name."""
    found = [(one["kind"], one["name"]) for one in spec.get("targetRefs", [])]
    found += [("Gateway", one["name"]) for one in spec.get("parentRefs", [])]
    backends = [one for part in spec.get("extProc", []) for one in part["backendRefs"]]
    backends += [one for rule in spec.get("rules", []) for one in rule.get("backendRefs", [])]
    backends += [spec["endpointPickerRef"]] if "endpointPickerRef" in spec else []
    return found + [(one.get("kind", "Service"), one["name"]) for one in backends]


@pytest.mark.parametrize("page", [one.name for one in ROOT.glob("docs/*.md")])
def test_pages_create_the_namespace_before_they_apply_an_overlay(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    told = text.find("kubectl apply -k deploy")
    assert told < 0 or -1 < text.find("kubectl create namespace llm") < told


def test_gateway_class_that_no_chart_makes_is_shown() -> None:
    (gateway,) = of_kind("envoy-gateway", "Gateway")
    page = (ROOT / "docs/gateways.md").read_text()
    shown = yaml.safe_load(page.split("<<END\n")[1].split("   END")[0])
    assert shown["kind"] == "GatewayClass"
    assert shown["metadata"]["name"] == gateway["spec"]["gatewayClassName"]


@overlays
def test_role_of_the_router_grants_only_reading_of_what_it_discovers(overlay: str) -> None:
    allowed = {
        (resource, verb)
        for role in of_kind(overlay, "Role")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {resource for resource, _ in allowed} == {"pods", "inferencepools"}
    assert {verb for _, verb in allowed} == {"get", "list", "watch"}
    assert of_kind(overlay, "ClusterRole", "ClusterRoleBinding") == []


@overlays
def test_router_and_envoy_are_confined(overlay: str) -> None:
    every = [one for template in pod_templates(overlay) for one in containers(template)]
    ours = [one for one in every if one["name"] in ("kvsteer", "envoy")]
    assert ours
    for container in ours:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert "cpu" not in container["resources"].get("limits", {})


def peers(overlay: str, policy: str, port: int) -> list[Manifest]:
    """Who may connect to a port of the pods of a NetworkPolicy."""
    (one,) = [one for one in of_kind(overlay, "NetworkPolicy") if one["metadata"]["name"] == policy]
    rules = [
        rule
        for rule in one["spec"]["ingress"]
        if any(
            ports["port"] <= port <= ports.get("endPort", ports["port"]) for ports in rule["ports"]
        )
    ]
    assert all(rule["from"] for rule in rules)
    return [peer for rule in rules for peer in rule["from"]]


@pytest.mark.parametrize("overlay", [one for one in OVERLAYS if one != "deployment"])
def test_network_policy_lets_only_envoy_and_the_router_reach_workers(overlay: str) -> None:
    if overlay == "sidecar":  # the router is in Envoy's pod
        envoys = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "envoy"}}}]
        routers = envoys
    else:
        envoys = peers(overlay, "kvsteer", 9002)
        routers = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kvsteer"}}}]
    assert peers(overlay, "vllm", 5557) == peers(overlay, "vllm", 5657) == routers
    expected = envoys + [one for one in routers if one not in envoys]
    assert peers(overlay, "vllm", 8000) == expected


def test_base_lets_proxies_and_scrapers_reach_a_router() -> None:
    def named(peer: Manifest) -> str:
        return str(peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"])

    assert [named(one) for one in peers("deployment", "kvsteer", 9002)] == ["envoy"]
    assert [named(one) for one in peers("deployment", "kvsteer", 9091)] == ["prometheus"]
    assert peers("deployment", "kvsteer", 9090) == []


@overlays
def test_service_account_token_is_mounted_in_the_router_only(overlay: str) -> None:
    for template in pod_templates(overlay):
        spec, every = template["spec"], containers(template)
        if spec.get("automountServiceAccountToken") is True:
            assert [one["name"] for one in every] == ["kvsteer"]
            continue
        tokens = [
            one["name"]
            for one in spec["volumes"]
            if any(
                "serviceAccountToken" in source
                for source in one.get("projected", {}).get("sources", [])
            )
        ]
        mounted = [
            (one["name"], mount["mountPath"])
            for one in every
            for mount in one["volumeMounts"]
            if mount["name"] in tokens
        ]
        folder = "/var/run/secrets/kubernetes.io/serviceaccount"
        assert mounted == [("kvsteer", folder)] * len(tokens)
        assert len(tokens) == any(one["name"] == "kvsteer" for one in every)


@overlays
def test_event_ports_equal_those_of_the_workers(overlay: str) -> None:
    (text,) = [
        one["data"]["kvsteer.yaml"]
        for one in of_kind(overlay, "ConfigMap")
        if "kvsteer.yaml" in one["data"]
    ]
    kubernetes = parse(text, overlay).discovery.kubernetes
    assert kubernetes is not None
    arguments = [
        argument
        for template in pod_templates(overlay)
        for container in containers(template)
        for argument in container["args"]
        if argument.startswith("--kv-events-config=")
    ]
    for argument in arguments:
        published = json.loads(argument.partition("=")[2])
        ports = [published[key].rpartition(":")[2] for key in ("endpoint", "replay_endpoint")]
        events = kubernetes.worker.events
        assert ports == [str(getattr(events, key)) for key in ("zmq_port", "replay_port")]


@pytest.mark.parametrize("overlay", [one for one in OVERLAYS if one != "sidecar"])
def test_service_names_whether_the_router_speaks_tls(overlay: str) -> None:
    (service,) = [
        one for one in of_kind(overlay, "Service") if one["metadata"]["name"] == "kvsteer"
    ]
    (port,) = [one for one in service["spec"]["ports"] if one["port"] == 9002]
    speaks_tls = configuration(overlay).extproc.tls is not None
    assert port["name"] == "grpc"
    assert port["appProtocol"] == ("https" if speaks_tls else "kubernetes.io/h2c")


@dial_tls
def test_gateways_that_dial_tls_are_served_from_a_mounted_secret(overlay: str) -> None:
    tls = configuration(overlay).extproc.tls
    assert tls is not None
    (template,) = [one for one in pod_templates(overlay) if is_router(one)]
    (container,) = containers(template)
    (volume,) = [one for one in template["spec"]["volumes"] if "secret" in one]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == volume["name"]]
    assert tls.certificate == f"{mount['mountPath']}/tls.crt"
    assert tls.key == f"{mount['mountPath']}/tls.key"
    probes = [container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    asked = [probe["httpGet"]["path"] for probe in probes]
    assert asked == ["/healthz", "/healthz", "/readyz"]
    assert {ports[probe["httpGet"]["port"]] for probe in probes} == {9091}


@dial_tls
def test_tls_changes_only_the_tls_section_of_an_inference_pool_router(overlay: str) -> None:
    plain = parse((KUBERNETES / "components/inferencepool/kvsteer.yaml").read_text(), "plain")
    over_tls = configuration(overlay)
    extproc = dataclasses.replace(over_tls.extproc, tls=None)
    assert dataclasses.replace(over_tls, extproc=extproc) == plain


def test_istio_router_alone_names_a_list_of_endpoints() -> None:
    named = {one: configuration(one).policy.endpoints for one in OVERLAYS}
    assert named == {**dict.fromkeys(OVERLAYS), "istio-inferencepool": 3}
    istio = configuration("istio-inferencepool")
    plain = parse((KUBERNETES / "components/inferencepool/kvsteer.yaml").read_text(), "plain")
    assert dataclasses.replace(istio, policy=plain.policy) == plain


def configuration(overlay: str) -> Config:
    """The router's."""
    texts = [one["data"].get("kvsteer.yaml") for one in of_kind(overlay, "ConfigMap")]
    return next(parse(text, overlay) for text in texts if text is not None)


def is_router(template: Manifest) -> bool:
    labels: dict[str, str] = template["metadata"]["labels"]
    return labels.get("app.kubernetes.io/name") == "kvsteer"


def test_envoy_gateway_client_cannot_steer_and_may_send_a_long_prompt() -> None:
    (policy,) = of_kind("envoy-gateway", "ClientTrafficPolicy")
    spec = policy["spec"]
    assert set(spec["headers"]["earlyRequestHeaders"]["remove"]) == RESERVED
    limit = int(spec["connection"]["bufferLimit"].removesuffix("Mi")) * 1024 * 1024
    assert limit >= parse((KUBERNETES / "base/kvsteer.yaml").read_text(), "").extproc.max_body_bytes


@overlays
def test_absent_router_fails_open_everywhere(overlay: str) -> None:
    for policy in of_kind(overlay, "EnvoyExtensionPolicy"):
        assert all(one["failOpen"] for one in policy["spec"]["extProc"])
    for pool in of_kind(overlay, "InferencePool"):
        assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
    for template in pod_templates(overlay):
        beside = template["spec"].get("initContainers", [])
        assert all("readinessProbe" not in container for container in beside)


def test_sidecar_and_envoy_share_the_socket_and_the_endpoints() -> None:
    config = parse((KUBERNETES / "components/sidecar/kvsteer.yaml").read_text(), "kvsteer.yaml")
    (template,) = [one for one in pod_templates("sidecar") if one["spec"].get("initContainers")]
    shared = set.intersection(
        *({mount["mountPath"] for mount in one["volumeMounts"]} for one in containers(template))
    )
    assert config.extproc.listen.removeprefix("unix:").rpartition("/")[0] in shared
    assert config.envoy.eds_directory in shared


def test_sharing_routers_meet_at_an_engine_that_only_they_reach() -> None:
    (text,) = [
        one["data"]["kvsteer.yaml"]
        for one in of_kind("scale", "ConfigMap")
        if "kvsteer.yaml" in one["data"]
    ]
    sharing = parse(text, "scale").sharing
    assert sharing is not None
    assert sharing.url == "valkey://valkey:6379"
    (router,) = [one for one in of_kind("scale", "Deployment") if _name(one) == "kvsteer"]
    assert router["spec"]["replicas"] == 3
    pod = router["spec"]["template"]["spec"]
    secrets = {one["name"]: one["secret"] for one in pod["volumes"] if "secret" in one}
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert sharing.secret_file == f"{mounts['sharing']}/secret"
    assert secrets["sharing"] == {"secretName": "kvsteer-sharing"}
    only = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "kvsteer"}}}]
    assert peers("scale", "valkey", 6379) == only
    (policy,) = [one for one in of_kind("scale", "NetworkPolicy") if _name(one) == "kvsteer"]
    assert 6379 in [
        port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])
    ]


def test_scrapes_are_off_where_routers_know_all_requests() -> None:
    for overlay in ("deployment", "scale", "sidecar", "envoy-gateway", "istio-envoyfilter"):
        for one in of_kind(overlay, "ConfigMap"):
            if text := one["data"].get("kvsteer.yaml"):
                assert parse(text, overlay).policy.scrape_interval_ms == 0


def test_istio_closes_idle_connections_as_early_as_our_own_configuration() -> None:
    (policy,) = of_kind("istio-envoyfilter", "EnvoyFilter")
    patches = [one["patch"]["value"] for one in policy["spec"]["configPatches"]]
    key = "typed_extension_protocol_options"
    (options,) = [one for each in patches for one in each.get(key, {}).values()]
    idle = options["common_http_protocol_options"]["idle_timeout"]
    assert idle == f"{IDLE_TIMEOUT.seconds}s"


def _name(manifest: Manifest) -> str:
    name: str = manifest["metadata"]["name"]
    return name
