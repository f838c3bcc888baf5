"""The Kubernetes manifests as kustomize builds them."""

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())

Manifest = dict[str, Any]


def built(overlay: str) -> list[Manifest]:
    """The objects that `kubectl apply -k` would send for an overlay; skips without kubectl."""
    return kustomized(KUBERNETES / "overlays" / overlay)


def kustomized(folder: Path) -> list[Manifest]:
    """The same for any folder with a kustomization."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl (on Debian: the package kubernetes-client)")
    return _build(folder)


@functools.cache
def _build(folder: Path) -> list[Manifest]:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


def of_kind(overlay: str, *kinds: str) -> list[Manifest]:
    """The manifests of some kinds."""
    return [one for one in built(overlay) if one["kind"] in kinds]


def pod_templates(overlay: str) -> list[Manifest]:
    """The pods' templates: metadata and spec."""
    workloads = of_kind(overlay, "Deployment", "StatefulSet")
    return [workload["spec"]["template"] for workload in workloads]


def containers(template: Manifest) -> list[Manifest]:
    """A pod's containers, including sidecars."""
    spec = template["spec"]
    found: list[Manifest] = spec.get("initContainers", []) + spec["containers"]
    return found


def selects(labels: dict[str, str], template: Manifest) -> bool:
    """Whether a label selector selects a pod."""
    given: dict[str, str] = template["metadata"]["labels"]
    return labels.items() <= given.items()
