"""Third-party images have a version, and a digest where it is known."""

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import OVERLAYS, ROOT, containers, pod_templates

# Their digests are not known here; those who deploy them pin them.
BY_TAG_ALONE = {"envoyproxy/envoy", "valkey/valkey", "vllm/vllm-openai", "lmsysorg/sglang"}
OURS = {"kvsteer", "registry.example.com/kvsteer"}

PIN = re.compile(r"(?m)^(\w+)=(\S+):([\w.-]+)@(sha256:[0-9a-f]{64})$")
PINS = {
    name: (image, tag)
    for name, image, tag, _ in PIN.findall((ROOT / "deploy/images.env").read_text())
}


def defaults(text: str) -> dict[str, tuple[str, str]]:
    """Returns image and tag for each variable of a compose file."""
    found = re.findall(r"\$\{(\w+_IMAGE):-([^}]+)\}", text)
    return {name: split(image) for name, image in found}


def split(image: str) -> tuple[str, str]:
    name, _, tag = image.partition(":")
    return name, tag


def named() -> dict[str, tuple[str, str]]:
    """Image and tag of every variable, in the Dockerfile and the compose files."""
    found: dict[str, tuple[str, str]] = {}
    for file in ROOT.glob("docker-compose*.yml"):
        found |= defaults(file.read_text())
    base = re.search(r"(?m)^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "deploy/Dockerfile").read_text())
    assert base is not None
    assert found["PYTHON_IMAGE"] == split(base[1])
    return found


def test_images_have_a_version_and_the_known_digest() -> None:
    images = named()
    pinned = {name: image for name, image in images.items() if name in PINS}
    assert pinned == PINS
    others = {name: one for name, one in images.items() if one[0] not in OURS}
    for name, (image, tag) in others.items():
        assert re.match(r"v?\d", tag), f"{name}: {image}:{tag} moves from release to release"
        assert name in PINS or image in BY_TAG_ALONE


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_no_image_without_a_version(overlay: str) -> None:
    for template in pod_templates(overlay):
        for container in containers(template):
            image, tag = split(container["image"])
            assert re.match(r"v?\d", tag), container["image"]
            assert image in BY_TAG_ALONE | OURS


def test_pins_are_renewed_from_the_registry(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    for name in ("Makefile", "deploy/images.env"):
        shutil.copy(ROOT / name, tmp_path / name)
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$@" >>asked\necho sha256:new\n')
    docker.chmod(docker.stat().st_mode | stat.S_IXUSR)
    make = shutil.which("make")
    assert make is not None
    path = f"{tmp_path}:/usr/bin:/bin"
    subprocess.run([make, "pins"], cwd=tmp_path, env={"PATH": path}, check=True)
    before = (ROOT / "deploy/images.env").read_text()
    after = (tmp_path / "deploy/images.env").read_text()
    assert after == re.sub(r"(?m)sha256:[0-9a-f]{64}$", "sha256:new", before)
    assert "prom/prometheus:v3.5.0" in (tmp_path / "asked").read_text()
