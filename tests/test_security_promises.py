"""Each promise of docs/security.md, and of the page of bounds behind it, has a test."""

import re
from pathlib import Path

import pytest

from tests import sanitize

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "security.md", ROOT / "docs" / "internals" / "attacks.md"]
TEXT = "\n".join(page.read_text() for page in PAGES)

# By words of the pages: the test that shows them, as file::test below tests/.
PROMISES = {
    "checks `Host`, `Origin` and `Sec-Fetch-Site`": (
        "extproc/admin/test_application.py::test_cross_site_requests_are_refused"
    ),
    "without its token gets 401, whatever is asked": (
        "extproc/admin/test_probe.py::test_probe_without_its_token_is_refused_whatever_is_asked"
    ),
    "An answer names no worker and no address": (
        "extproc/admin/test_probe.py::test_probe_names_no_worker_address_or_secret"
    ),
    "is the same whatever other tenants have cached": (
        "extproc/admin/test_probe.py::test_answer_does_not_depend_on_what_other_tenants_cached"
    ),
    "the probe itself is booked nowhere": (
        "extproc/admin/test_probe.py::test_probe_books_counts_and_notes_nothing"
    ),
    "has a NetworkPolicy that allows proxies to reach 9002": (
        "deploy/test_manifests.py::test_base_lets_proxies_and_scrapers_reach_a_router"
    ),
    "speaks TLS 1.2 and 1.3": ("extproc/serving/test_tls.py::test_tls_below_1_2_is_refused"),
    "A peer that does not finish its handshake is dropped": (
        "extproc/serving/test_tls.py::test_peer_without_a_handshake_is_disconnected"
    ),
    "A handshake that fails is counted": (
        "extproc/serving/test_tls.py::test_failed_handshakes_are_all_counted_and_seldom_logged"
    ),
    "does not get past the handshake": (
        "extproc/serving/test_tls.py::test_client_without_a_valid_certificate_is_refused"
    ),
    "follows links as Kubernetes mounts them": (
        "extproc/serving/test_certificates.py::test_look_follows_a_secret_mounted_as_a_link_to_a_folder"
    ),
    "nothing changes: the old files stay in use": (
        "extproc/serving/test_certificates.py::test_look_ignores_half_a_pair_and_logs_it_once"
    ),
    "open connections continue": (
        "extproc/serving/test_tls.py"
        "::test_renewed_files_serve_new_connections_while_old_streams_continue"
    ),
    "checked against the new authorities": (
        "extproc/serving/test_tls.py::test_replaced_authority_admits_no_client"
    ),
    "Files that cannot be used at the start are an error": (
        "extproc/serving/test_certificates.py::test_start_error_names_missing_and_mismatched_files"
    ),
    "from the moment it is created": (
        "extproc/running/test_lifecycle.py::test_socket_has_its_rights_and_is_removed_with_the_router"
    ),
    "but never a socket that is in use, or a file": (
        "extproc/serving/test_listening.py::test_bound_socket_replaces_a_dead_socket_only"
    ),
    "overwrites or removes `x-gateway-destination-endpoint`": (
        "system/routing/test_routing.py::test_destination_header_of_a_client_never_steers"
    ),
    "early header mutation removes them": (
        "extproc/envoy/test_envoy_config.py::test_client_headers_that_steer_are_removed"
    ),
    "requests with different salts never match": (
        "kvstate/index/test_core.py::test_prompts_meet_only_chains_of_the_same_salt"
    ),
    "a block that was announced again while it was held is not certain after a removal": (
        "kvstate/test_reports.py"
        "::test_credit_is_certain_only_for_held_blocks_whatever_is_announced_again"
    ),
    "Bodies, JSON nesting": (
        "system/attacks/test_bodies.py::test_costly_bodies_are_placed_by_load_and_do_not_block_the_loop"
    ),
    "Two bodies of 28 MiB a second delay others' decisions": (
        "system/attacks/test_bodies.py"
        "::test_large_bodies_at_two_a_second_delay_no_decision_in_any_mode"
    ),
    "whatever is on": (
        "system/attacks/test_bodies.py::test_large_bodies_of_one_tenant_delay_no_decision_of_others"
    ),
    "who sends many waits for his own": (
        "extproc/serving/test_turns.py::test_who_sent_much_waits_for_who_sent_little"
    ),
    "in any form of body": (
        "system/attacks/test_edited_bodies.py"
        "::test_engine_finds_nothing_that_the_client_must_not_say"
    ),
    "A body that is not read with certainty is refused": (
        "extproc/requests/test_edits.py::test_each_feature_refuses_what_it_cannot_be_certain_of"
    ),
    "is answered 5xx, not sent on": (
        "extproc/running/test_failure_mode_watch.py"
        "::test_envoys_configuration_fails_closed_with_tenants_unless_told_otherwise"
    ),
    "refused if it is another user's, writable by others": (
        "extproc/running/test_state_file.py::test_files_that_others_may_have_written_are_refused"
    ),
    "damaged, older than a day": (
        "extproc/running/test_state_file.py::test_refused_files_are_named_with_the_reason"
    ),
    "Treat it as an engine's memory: mode 0600": (
        "extproc/running/test_state_file.py"
        "::test_file_is_readable_by_its_user_alone_and_names_no_token"
    ),
    "for the router's own user": (
        "extproc/running/test_handover.py::test_only_its_own_user_may_ask"
    ),
    "it can neither take blocks from other workers": "kvstate/index/test_index_by_oracle.py::",
    "a worker may name only its own host": (
        "extproc/fleet/feeds/test_feeds.py::test_feed_host_must_be_of_the_worker_or_listed"
    ),
    "no publisher that another worker named before": (
        "extproc/fleet/feeds/test_feeds.py::test_feed_of_another_worker_is_not_credited_to_its_announcer"
    ),
    "A pod's annotation may name 64 ranks": (
        "extproc/fleet/feeds/test_feeds.py::test_ranks_beyond_64_are_refused_unless_more_are_configured"
    ),
    "`/tokenize` answers are bounded as well": (
        "extproc/fleet/proof/test_verifying.py"
        "::test_endless_answer_is_read_up_to_its_limit_and_blocks_nothing"
    ),
    "only that worker is routed approximately": (
        "extproc/fleet/proof/test_verifying.py::test_difference_of_one_worker_is_named_among_others"
    ),
    "delay those of the others by at most one turn": (
        "kvstate/feeds/test_turns.py::test_turns_per_loop_iteration_are_bounded"
    ),
    "is refused and counts as a hole in that feed": (
        "kvstate/test_steps.py::test_oversized_batch_is_refused_as_a_whole"
    ),
    "both shared by its ranks": (
        "kvstate/index/test_owner.py::test_limits_are_shared_by_the_ranks_of_a_worker"
    ),
    "at most 2 of the 8 replays": (
        "kvstate/feeds/test_replays.py::test_slots_are_not_exhausted_by_a_worker_of_many_ranks"
    ),
    "lines that repeat are written 20 times a minute": (
        "extproc/base/test_logs.py::test_less_often_drops_and_counts_frequent_lines_about_a_feed"
    ),
    "gRPC stream is bounded alike": (
        "system/attacks/test_grpc_feeds.py::test_hostile_engine_stream_blocks_neither_loop_nor_log"
    ),
    "25 times a second at most": (
        "system/attacks/test_grpc_feeds.py::test_engine_whose_streams_end_at_once_is_asked_again_slowly"
    ),
    "At most 4,096 addresses": (
        "extproc/fleet/discovery/test_dns_names.py"
        "::test_dns_names_take_too_many_addresses_for_a_fault_and_keep_the_last"
    ),
    "Link-local addresses": (
        "extproc/fleet/discovery/test_dns_names.py::test_addresses_that_no_worker_has_are_left_out"
    ),
    "each within 2 s of CPU and 400 MiB": (
        "extproc/templates/test_hostile_templates.py"
        "::test_hostile_template_ends_in_time_and_within_its_memory"
    ),
    "attempts to leave the sandbox": (
        "extproc/templates/test_hostile_templates.py::test_hostile_template_stays_within_the_sandbox"
    ),
    "templates of more than 1 MiB together": (
        "extproc/tokenizing/test_hostile_files.py::test_hostile_template_file_is_refused_by_name"
    ),
    "more than 131,072 added tokens": (
        "extproc/tokenizing/test_hostile_files.py::test_hostile_tokenizer_ends_in_time_and_is_named"
    ),
    "a reference of the cache that is none": (
        "extproc/tokenizing/test_hostile_files.py"
        "::test_hostile_reference_of_the_cache_is_refused_by_name"
    ),
    "of outages of Valkey or Redis only the 1st": (
        "extproc/sharing/test_outages.py"
        "::test_log_of_outages_grows_as_the_logarithm_of_their_number_and_slowly_with_time"
    ),
    "can neither forge nor change a message": (
        "extproc/sharing/test_messages.py::test_decoded_refuses_a_message_changed_anywhere"
    ),
    "A message counts once": (
        "extproc/sharing/test_other_routers.py::test_repeated_message_counts_once"
    ),
    "a recording counts for nothing": (
        "extproc/sharing/test_liars.py::test_recording_of_an_ended_router_is_ignored"
    ),
    "Messages that are held back": (
        "extproc/sharing/test_liars.py::test_delayed_messages_keep_their_router_only_for_a_moment"
    ),
    "Repeating a router's own messages": (
        "extproc/sharing/test_sharing.py::test_messages_with_the_own_tag_count_against_the_budget"
    ),
    "They cannot name a worker": (
        "extproc/sharing/test_other_routers.py::test_news_of_unknown_workers_change_nothing"
    ),
    "cannot be silenced in its name": (
        "extproc/sharing/test_liars.py::test_liar_under_the_name_of_a_router_silences_no_router"
    ),
    "64 KiB a message": (
        "extproc/sharing/test_messages.py::test_decoded_refuses_values_out_of_bounds"
    ),
    "131,072 fingerprints at once": (
        "extproc/sharing/test_liars.py::test_claims_of_a_router_are_bounded"
    ),
    "at most 40 seconds of its work": (
        "extproc/sharing/test_liars.py::test_utilization_is_bounded_for_any_figures"
    ),
    "at most 20 lines a minute": (
        "extproc/base/test_logs.py::test_less_often_drops_lines_about_routers_under_any_name"
    ),
    "20 ms of 100 ms": (
        "extproc/sharing/test_sharing.py::test_flood_uses_a_bounded_share_of_the_time"
    ),
    "answers what it was not asked": (
        "extproc/sharing/test_hostile_engine.py::test_engine_that_breaks_the_protocol_is_dropped"
    ),
    "created for the router's own user alone (0700)": (
        "extproc/sharing/test_sharing.py::test_directory_is_private_and_left_empty"
    ),
    "Several processes of one router share such a directory": (
        "extproc/running/test_processes.py::test_sockets_shared_by_processes_are_private_to_their_user"
    ),
    "within 0 to 100": (
        "extproc/running/test_processes.py::test_follow_steers_no_other_percentage_than_one_from_0_to_100"
    ),
    "contain no prompt text": (
        "system/attacks/test_discretion.py::test_router_output_contains_nothing_that_a_client_sent"
    ),
    "without its message, which could quote a request": (
        "system/attacks/test_discretion.py::test_internal_error_is_logged_without_its_message"
    ),
    "Keys, passwords and the shared secret": (
        "system/attacks/test_secrets.py::test_router_output_contains_no_secret_even_after_a_crash"
    ),
    "no request waits for it": (
        "extproc/observing/test_hostile_collector.py"
        "::test_endless_collector_answer_delays_neither_decisions_nor_the_stop"
    ),
    "64 KiB of an answer": (
        "extproc/observing/test_hostile_collector.py::test_session_reads_an_answer_up_to_its_limit"
    ),
    "It writes no text, no token id": (
        "system/observing/test_recorder.py::test_recorder_writes_requests_without_their_prompts"
    ),
    "inherit it in their environment": (
        "extproc/features/recording/test_recorder.py"
        "::test_drawn_secret_is_shared_by_processes_of_one_parent_only"
    ),
    "kept at most `recorder.hours`": (
        "extproc/features/recording/test_recorder.py::test_recording_of_an_earlier_run_ends_with_its_hours"
    ),
    "may get, list and watch pods": (
        "deploy/test_manifests.py::test_role_of_the_router_grants_only_reading_of_what_it_discovers"
    ),
    "Only the router's container has the token": (
        "deploy/test_manifests.py::test_service_account_token_is_mounted_in_the_router_only"
    ),
    "open to Envoy and the router only": (
        "deploy/test_manifests.py::test_network_policy_lets_only_envoy_and_the_router_reach_workers"
    ),
    "needs no capability and no writable root": (
        "deploy/test_manifests.py::test_router_and_envoy_are_confined"
    ),
}


def words(text: str) -> str:
    """The text with single spaces."""
    return " ".join(text.split())


@pytest.mark.parametrize("promise", PROMISES)
def test_promise_is_on_a_page_and_its_test_exists(promise: str) -> None:
    assert words(promise) in words(TEXT)
    file, _, name = PROMISES[promise].partition("::")
    assert re.search(rf"def {name}\(" if name else "", (ROOT / "tests" / file).read_text())


ATTACKS = re.findall(r"^\| (?!attack )(.+?)(\*?) \| `(\S+\.py)::(\w*)` \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("attack", "is_sanitized", "file", "name"), ATTACKS)
def test_attack_is_a_test(attack: str, is_sanitized: str, file: str, name: str) -> None:
    assert attack
    assert re.search(rf"def {name}\(" if name else "", (ROOT / "tests" / file).read_text())
    run = [one.partition("::") for one in sanitize.TESTED]
    of_file = [(path, test) for path, _, test in run if path == file and test in ("", name)]
    assert bool(of_file) == bool(is_sanitized)


def test_pages_have_all_attacks() -> None:
    assert len(ATTACKS) == 18


def test_pages_count_the_tested_templates() -> None:
    from tests.extproc.templates.test_hostile_templates import ESCAPES, LONG

    text = words(TEXT)
    assert f"{len(LONG)} hostile templates" in text
    assert f"{len(ESCAPES)} attempts to leave the sandbox" in text
