"""Pull requests are checked as a release is, with rights to read only."""

from typing import Any

import yaml

from tests.deploy.manifests import ROOT

WORKFLOWS = ROOT / ".github/workflows"
CHECK: dict[Any, Any] = yaml.safe_load((WORKFLOWS / "check.yml").read_text())
RELEASE: dict[Any, Any] = yaml.safe_load((WORKFLOWS / "release.yml").read_text())


def test_pull_request_runs_all_checks_with_rights_to_read_only() -> None:
    assert "pull_request" in CHECK[True]  # YAML reads the key `on` as true
    assert CHECK["permissions"] == {"contents": "read"}
    (job,) = CHECK["jobs"].values()
    assert "permissions" not in job
    assert job["steps"][-1] == {"run": ".ci/run"}


def test_pull_request_is_checked_where_a_release_is() -> None:
    (job,), released = CHECK["jobs"].values(), RELEASE["jobs"]["check"]
    assert job["container"] == released["container"]
    assert job["steps"][0] == released["steps"][0]
