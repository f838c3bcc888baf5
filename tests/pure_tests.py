"""The tests that test_pure_coverage.py runs under coverage.

CI runs that first. With KVSTEER_BESIDES=pure in the environment, the runs after it leave these
files out, so that no test runs twice.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from tests.imports import MEASURED, MODULES, ROOT, imports_in, pure_modules

# Quick tests of shells that run pure modules as well.
BESIDES = (
    "tests/extproc/admin/test_report.py",
    "tests/extproc/fleet/load/test_computed.py",
    "tests/extproc/fleet/proof/test_proof_memory.py",
    "tests/extproc/commands/test_admin_client.py",
    "tests/extproc/requests/test_known_messages.py",
    "tests/extproc/requests/test_paths.py",
    "tests/extproc/serving/test_router.py",
    "tests/extproc/serving/test_exchange.py",
    "tests/kvstate/test_fleet.py",
    "tests/kvtools/doctor/test_probe.py",
    "tests/extproc/observing/test_drift_families.py",
    "tests/extproc/observing/test_metrics.py",
    "tests/extproc/admin/test_application.py",
    "tests/extproc/routing/test_fleet_scenarios.py",
    "tests/kvtools/envoy/test_envoy_patch.py",
    "tests/extproc/requests/test_reserved_grpc_fields.py",
    "tests/extproc/serving/test_tenants.py",
    "tests/extproc/features/classes/test_classes.py",
    "tests/extproc/features/holding/test_holding.py",
    "tests/extproc/serving/test_waits.py",
    "tests/extproc/serving/test_conformance.py",
    "tests/extproc/proof/test_trust.py",
    "tests/kvstate/feeds/test_allowance.py",
    "tests/kvstate/index/test_turnover.py",
    "tests/extproc/routing/claims/test_claim_table.py",
    "tests/extproc/running/test_failure_mode_watch.py",
    "tests/extproc/running/test_state_file.py",
    "tests/extproc/rust/test_gpt_oss.py",
    "tests/extproc/rust/test_recorded_prompts.py",
    "tests/extproc/sglang/test_continuation.py",
    "tests/extproc/sglang/test_media.py",
    "tests/extproc/sglang/test_multimodal.py",
    "tests/extproc/sglang/test_recorded_prompts.py",
    "tests/extproc/sglang/test_rules.py",
    "tests/extproc/sglang/test_values.py",
    "tests/extproc/templates/test_dialects.py",
    "tests/extproc/templates/test_minimax_m3.py",
    "tests/kvstate/test_saved_fleet.py",
    "tests/kvstate/index/test_saved_owner.py",
    "tests/kvstate/relay/test_relay.py",
    "tests/extproc/sharing/test_rows.py",
    "tests/extproc/tokenizing/test_added_tokens.py",
    "tests/extproc/tokenizing/test_empty_tools.py",
    "tests/extproc/tokenizing/test_kimi_chat.py",
    "tests/extproc/tokenizing/test_plain_turns.py",
)

# Impure modules that tests may import as well, to set something up.
READERS = {"extproc.config.reader", "extproc.base.tokenizer_files"}


def files_of_pure_tests() -> Iterator[Path]:
    """Returns the tests that import only pure modules of the product, and those named above."""
    yield from (ROOT / name for name in BESIDES)
    for package in MEASURED:
        for file in sorted((ROOT / "tests" / package).rglob("test_*.py")):
            ours = {name for name in imports_in(file) if name in MODULES}
            if ours and ours <= pure_modules() | READERS:
                yield file


def left_out() -> frozenset[Path]:
    """Returns the files that this run leaves out, because CI has run them under coverage."""
    if os.environ.get("KVSTEER_BESIDES") != "pure":
        return frozenset()
    return frozenset({*files_of_pure_tests(), ROOT / "tests" / "test_pure_coverage.py"})
