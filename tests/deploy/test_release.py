"""The release workflow publishes only what was tested, with as few rights as that takes."""

import re
from typing import Any

import yaml

from tests.deploy.manifests import ROOT

FILE = ROOT / ".github/workflows/release.yml"
WORKFLOW: dict[Any, Any] = yaml.safe_load(FILE.read_text())
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]


def needed(job: str) -> set[str]:
    """All jobs that a job waits for, directly or not."""
    needs = JOBS[job].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*map(needed, direct))


def steps(job: str, action: str) -> list[dict[str, Any]]:
    found = [one for one in JOBS[job]["steps"] if one.get("uses", "").startswith(f"{action}@")]
    return [one.get("with", {}) for one in found]


def test_publishing_needs_all_tests_and_every_wheel() -> None:
    assert needed("publish") == {"check", "sdist", "wheels", "try"}
    assert needed("image") == {"check"}
    runs = [one.get("run", "") for one in JOBS["check"]["steps"]]
    assert ".ci/run" in runs
    (script,) = [one for one in runs if "tomllib" in one]
    assert '["project"]["version"]' in script


def test_publishing_needs_a_pushed_tag() -> None:
    on_tag = "github.ref_type == 'tag'"
    assert WORKFLOW[True]["push"] == {"tags": ["v*"]}  # YAML reads the key `on` as true
    assert JOBS["publish"]["if"] == on_tag
    (build,) = steps("image", "docker/build-push-action")
    assert build["push"] == f"${{{{ {on_tag} }}}}"


def test_jobs_have_only_the_rights_that_they_use() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    rights = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert rights == {
        "publish": {"id-token": "write"},
        "image": {"contents": "read", "packages": "write"},
    }
    assert JOBS["publish"]["environment"] == "pypi"


def test_workflow_holds_no_secret_and_checks_out_no_credentials() -> None:
    assert "secrets." not in FILE.read_text()
    for name in JOBS:
        for checkout in steps(name, "actions/checkout"):
            assert checkout["persist-credentials"] is False


def test_actions_are_pinned_by_the_hash_of_a_named_version() -> None:
    uses = re.findall(r"(?m)^ *(?:- )?uses: (.*)$", FILE.read_text())
    assert len(uses) == sum("uses" in step for job in JOBS.values() for step in job["steps"])
    pins: dict[str, str] = {}
    for one in uses:
        pinned = re.fullmatch(r"([\w/-]+)@([0-9a-f]{40}) # v\d+\.\d+\.\d+", one)
        assert pinned is not None, one
        assert pins.setdefault(pinned[1], one) == one


def test_expressions_reach_no_shell() -> None:
    scripts = [one["run"] for job in JOBS.values() for one in job["steps"] if "run" in one]
    assert [one for one in scripts if "${{" in one] == []


def test_image_has_two_platforms_an_inventory_and_its_provenance() -> None:
    (build,) = steps("image", "docker/build-push-action")
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert build["sbom"] is True
    assert build["provenance"] == "mode=max"
    assert (ROOT / build["file"]).exists()
    assert "PYTHON_IMAGE=${{ env.PYTHON_IMAGE }}" in build["build-args"]


def test_packages_are_published_with_attestations() -> None:
    (publish,) = steps("publish", "pypa/gh-action-pypi-publish")
    assert publish == {"attestations": True}  # and no password: the workflow is trusted itself


def test_wheels_are_built_on_a_native_runner_of_each_processor() -> None:
    matrix = JOBS["wheels"]["strategy"]["matrix"]["include"]
    assert {(one["runs-on"].split("-")[0], one["arch"]) for one in matrix} == {
        ("ubuntu", "x86_64"),
        ("ubuntu", "aarch64"),
        ("macos", "x86_64"),
        ("macos", "arm64"),
    }
