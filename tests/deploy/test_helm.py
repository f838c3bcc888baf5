"""The Helm chart renders what the kustomize base applies, and refuses values that cannot work."""

import base64
import functools
import json
import os
import shutil
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml

from extproc.config.reader import parse
from tests.deploy.manifests import KUBERNETES, ROOT, Manifest, kustomized
from tests.deploy.test_manifests import OLDEST_KUBERNETES

CHART = ROOT / "deploy/helm/kvsteer"
HELM = os.environ.get("KVSTEER_TEST_HELM") or shutil.which("helm")

pytestmark = pytest.mark.skipif(
    HELM is None,
    reason="needs helm, on PATH or named by KVSTEER_TEST_HELM (CONTRIBUTING.md)",
)

# Labels that Helm writes and kustomize does not.
HELMS = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"} | {
    "app.kubernetes.io/version"
}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    # a helm built by `go install` assumes a very old cluster
    command = [str(HELM), *arguments, "--kube-version", f"{OLDEST_KUBERNETES}.0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@functools.cache
def rendered(*values: str) -> list[Manifest]:
    """What the chart renders with some values set."""
    sets = [part for value in values for part in ("--set-json", value)]
    done = helm("template", "kvsteer", str(CHART), "--namespace", "llm", *sets)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


def one_of(kind: str, manifests: list[Manifest]) -> Manifest:
    (found,) = [one for one in manifests if one["kind"] == kind]
    return found


def pod(manifests: list[Manifest]) -> Manifest:
    spec: Manifest = one_of("Deployment", manifests)["spec"]["template"]["spec"]
    return spec


def without(node: Any, *names: str) -> Any:
    """A manifest without these keys, which the two tools write differently, and empty maps."""
    if isinstance(node, dict):
        kept = {key: without(value, *names) for key, value in node.items() if key not in names}
        return {key: value for key, value in kept.items() if value != {}}
    return [without(one, *names) for one in node] if isinstance(node, list) else node


def comparable(manifest: Manifest) -> Manifest:
    plain: Manifest = without(
        manifest, *HELMS, "namespace", "checksum/config", "app.kubernetes.io/part-of"
    )
    plain["metadata"].pop("labels", None)  # of the object itself: nothing selects by them
    if manifest["kind"] == "Deployment":
        spec = plain["spec"]["template"]["spec"]
        container = spec["containers"][0]
        container["image"] = container["image"].partition(":")[0]  # the base has no tag
        assert container.pop("imagePullPolicy", "IfNotPresent") == "IfNotPresent"
        # kustomize names it by its content; the chart has an annotation for that instead
        spec["volumes"][0]["configMap"]["name"] = "kvsteer"
    if manifest["kind"] == "ConfigMap":
        plain["metadata"]["name"] = "kvsteer"
        plain["data"] = yaml.safe_load(plain["data"]["kvsteer.yaml"])
    return plain


def test_helm_finds_no_fault_in_the_chart() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_chart_renders_what_the_kustomize_base_applies() -> None:
    base = {(one["kind"], one["apiVersion"]): one for one in kustomized(KUBERNETES / "base")}
    chart = {(one["kind"], one["apiVersion"]): one for one in rendered()}
    assert set(chart) == set(base)
    for key, ours in chart.items():
        assert comparable(ours) == comparable(base[key])


@pytest.mark.parametrize(
    "values",
    [
        (),
        ('tls={"secret": "kvsteer-tls"}', "replicas=3", "sharing.valkey=true"),
        ('sharing={"url": "valkeys://v.test:6379/0", "secret": "fleet"}', "replicas=2"),
        (
            'podLabels={"team": "a"}',
            'imagePullSecrets=[{"name": "mine"}]',
            'extraEnv=[{"name": "A", "value": "b"}]',
            'extraVolumes=[{"name": "models", "emptyDir": {}}]',
            'extraVolumeMounts=[{"name": "models", "mountPath": "/models"}]',
            'nodeSelector={"disk": "fast"}',
            'tolerations=[{"operator": "Exists"}]',
        ),
        ("serviceAccount.create=false", "networkPolicy.enabled=false"),
    ],
)
def test_rendered_manifests_are_valid(values: tuple[str, ...]) -> None:
    for manifest in rendered(*values):
        kubernetes_validate.validate(manifest, OLDEST_KUBERNETES, strict=True)
    text = one_of("ConfigMap", rendered(*values))["data"]["kvsteer.yaml"]
    assert parse(text, "chart").discovery.kubernetes is not None


def test_configuration_numbers_stay_whole() -> None:
    manifests = rendered("config.extproc.max_body_bytes=33554432")
    config = parse(one_of("ConfigMap", manifests)["data"]["kvsteer.yaml"], "chart")
    assert config.extproc.max_body_bytes == 33_554_432
    assert config.extproc.listen == "0.0.0.0:9002"  # what was not set keeps its value


def test_changed_configuration_rolls_the_pods_out() -> None:
    before, after = (
        one_of("Deployment", some)["spec"]["template"]["metadata"]["annotations"]
        for some in (rendered(), rendered("config.extproc.deadline_ms=200"))
    )
    assert before["checksum/config"] != after["checksum/config"]


def test_tls_secret_makes_the_router_serve_tls_and_moves_its_probe() -> None:
    manifests = rendered('tls={"secret": "mine"}')
    config = parse(one_of("ConfigMap", manifests)["data"]["kvsteer.yaml"], "chart")
    assert config.extproc.tls is not None
    assert config.extproc.tls.certificate == "/etc/kvsteer-tls/tls.crt"
    assert {"name": "tls", "secret": {"secretName": "mine", "defaultMode": 288}} in pod(manifests)[
        "volumes"
    ]
    (container,) = pod(manifests)["containers"]
    probes = [container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")]
    assert [one["httpGet"]["path"] for one in probes] == ["/healthz", "/healthz", "/readyz"]
    assert one_of("Service", manifests)["spec"]["ports"][0]["appProtocol"] == "https"


def test_probe_secret_makes_the_router_serve_probes_to_the_named_gateways_alone() -> None:
    gateways = [{"podSelector": {"matchLabels": {"app": "above"}}}]
    named = f"networkPolicy.gateways={json.dumps(gateways)}"
    closed, manifests = (rendered('probe.secret="mine"', *more) for more in ((), (named,)))
    probe = parse(one_of("ConfigMap", manifests)["data"]["kvsteer.yaml"], "chart").probe
    (container,) = pod(manifests)["containers"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert probe is not None
    assert (probe.listen, probe.token_file) == ("0.0.0.0:9092", f"{mounts['probe']}/token")
    assert {"name": "probe", "containerPort": 9092} in container["ports"]
    ports = {one["name"]: one["port"] for one in one_of("Service", manifests)["spec"]["ports"]}
    assert ports["probe"] == 9092
    rules = one_of("NetworkPolicy", manifests)["spec"]["ingress"]
    assert rules[-1] == {"from": gateways, "ports": [{"port": 9092, "protocol": "TCP"}]}
    assert "9092" not in str(one_of("NetworkPolicy", closed))
    assert "9092" not in str(rendered())


def test_one_value_brings_what_three_routers_share_through() -> None:
    manifests = rendered("replicas=3", "sharing.valkey=true")
    (config,) = [one["data"]["kvsteer.yaml"] for one in manifests if one["kind"] == "ConfigMap"]
    sharing = parse(config, "chart").sharing
    named = {(one["kind"], one["metadata"]["name"]): one for one in manifests}
    assert sharing is not None
    assert sharing.url == "valkey://kvsteer-valkey:6379"
    assert ("Service", "kvsteer-valkey") in named
    assert len(base64.b64decode(named["Secret", "kvsteer-sharing"]["data"]["secret"])) == 64
    router = named["Deployment", "kvsteer"]["spec"]["template"]["spec"]
    mounts = {one["name"]: one["mountPath"] for one in router["containers"][0]["volumeMounts"]}
    assert sharing.secret_file == f"{mounts['sharing']}/secret"
    (only,) = named["NetworkPolicy", "kvsteer-valkey"]["spec"]["ingress"]
    selected = named["Deployment", "kvsteer"]["spec"]["selector"]["matchLabels"]
    assert only["from"] == [{"podSelector": {"matchLabels": selected}}]


def test_several_routers_that_share_nothing_are_refused() -> None:
    for wrong in ("replicas=2", 'sharing.url="valkey://v.test:6379"'):
        done = helm("template", "kvsteer", str(CHART), "--set-json", wrong)
        assert done.returncode != 0
        assert "sharing" in done.stderr


def test_service_monitor_is_rendered_if_wanted() -> None:
    assert [one for one in rendered() if one["kind"] == "ServiceMonitor"] == []
    monitor = one_of("ServiceMonitor", rendered("serviceMonitor.enabled=true"))
    service = one_of("Service", rendered())
    assert monitor["spec"]["endpoints"][0]["port"] in {
        port["name"] for port in service["spec"]["ports"]
    }
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )


@pytest.mark.parametrize(
    "value",
    [
        "replica=3",
        'config.extproc.listen="127.0.0.1:7000"',
        "config.models=[]",
        "terminationGracePeriodSeconds=5",
        "networkPolicy.envoy=[]",
    ],
)
def test_impossible_values_are_refused(value: str) -> None:
    done = helm("template", "kvsteer", str(CHART), "--set-json", value)
    assert done.returncode != 0
    assert value.partition("=")[0].rpartition(".")[2] in done.stderr
