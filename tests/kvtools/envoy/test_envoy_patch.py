"""What `kvsteer envoy --patch` adds and refuses; test_patched_envoy.py of tests/system runs it."""

import json
import re
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from extproc.__main__ import main
from extproc.base.errors import ConfigError
from extproc.config.reader import parse
from extproc.config.schema import Config
from extproc.config.sections import SESSION_HEADERS
from kvtools.envoy.envoy_patch import LOG_FIELDS, Patch, PatchOptions, difference, patched

ROOT = Path(__file__).parents[3]
PORTS = {"port": 8443, "admin": 9901, "first": 8001, "second": 8002, "shop": 7000}
FILES = {"certificate": "/crt", "key": "/key", "log": "/dev/null"}
USER = Template((ROOT / "tests/system/ingresses/users_envoy.yaml").read_text()).substitute(
    PORTS, **FILES
)

CONFIG = """\
models: [{name: m}]
workers: [{endpoint: "127.0.0.1:8001"}, {endpoint: "127.0.0.1:8002"}]
"""
RETRIES = """\
                            retry_policy:
                              retry_on: 5xx,connect-failure
                              num_retries: 2
"""
FILTER = "envoy.filters.http.ext_proc"
OFF = {
    FILTER: {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
        "disabled": True,
    }
}

Tree = dict[str, Any]


def config(more: str = "") -> Config:
    return parse(CONFIG + more, "c")


def changed(*replacements: tuple[str, str]) -> str:
    """The user's file with some texts replaced, each of which occurs once in it."""
    text = USER
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def patch(text: str = USER, choice: PatchOptions = PatchOptions(), more: str = "") -> Patch:
    found = patched(text, "envoy.yaml", config(more), choice)
    again = patched(found.text, "envoy.yaml", config(more), choice)
    assert again.text == found.text
    return found


def tree(text: str) -> Tree:
    found: Tree = yaml.safe_load(text)
    return found


def manager(found: Tree) -> Tree:
    (one,) = found["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    settings: Tree = one["typed_config"]
    return settings


def routes(found: Tree) -> list[Tree]:
    listed: list[Tree] = manager(found)["route_config"]["virtual_hosts"][0]["routes"]
    return listed


def cluster(found: Tree, name: str) -> Tree:
    (one,) = [one for one in found["static_resources"]["clusters"] if one["name"] == name]
    settings: Tree = one
    return settings


def override(found: Tree) -> Tree:
    (policy,) = cluster(found, "engines")["load_balancing_policy"]["policies"]
    settings: Tree = policy["typed_extension_config"]["typed_config"]
    return settings


def plain(value: Any) -> Any:
    """Removes the trailing zeros of durations, and the quotes around numbers."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return re.sub(r"(\.\d*?)0+s$", r"\1s", value) if isinstance(value, str) else value


def refusal(text: str, choice: PatchOptions = PatchOptions(), more: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        patched(text, "envoy.yaml", config(more), choice)
    (fault,) = caught.value.faults
    return fault


def test_patch_adds_what_the_fragments_contain() -> None:
    texts = (ROOT / "envoy/add-to-your-envoy.yaml").read_text()
    edge, engines, router, host, other = (one for one in yaml.safe_load_all(texts) if one)
    found = plain(tree(patch(changed((RETRIES, ""))).text))
    assert manager(found)["http_filters"][1:2] == plain(edge["http_filters"])
    key = "early_header_mutation_extensions"
    assert manager(found)[key] == edge[key]
    there = cluster(found, "engines")
    assert {key: there[key] for key in engines} == plain(engines)
    assert {**cluster(found, "kvsteer"), "connect_timeout": 0} == {
        **plain(router),
        "connect_timeout": 0,
    }
    shop, workers = routes(found)
    assert shop["typed_per_filter_config"] == other["typed_per_filter_config"]
    retries = workers["route"]["retry_policy"]
    there = {**workers, "retry_policy": retries}
    assert {key: there[key] for key in host} == plain(host)


def test_patch_keeps_every_line_but_the_replaced_policy() -> None:
    lines = difference(USER, patch().text, "envoy.yaml").splitlines()[2:]
    gone = [line for line in lines if line.startswith("-")]
    assert gone == ["-      lb_policy: ROUND_ROBIN  # fair"]


def test_patch_inserts_the_filter_before_the_router_and_disables_it_elsewhere() -> None:
    found = tree(patch().text)
    names = [one["name"] for one in manager(found)["http_filters"]]
    assert names == ["envoy.filters.http.lua", FILTER, "envoy.filters.http.router"]
    shop, workers = routes(found)
    assert shop["typed_per_filter_config"] == OFF
    assert "typed_per_filter_config" not in workers
    assert workers["route"]["retry_policy"] == {"retry_on": "5xx,connect-failure", "num_retries": 2}
    assert "retry_policy" not in shop["route"]


def test_patch_disables_a_whole_host_without_routes_to_workers() -> None:
    another = (
        "                    - {name: b, domains: [b], routes: [{match: {prefix: /},"
        " redirect: {https_redirect: true}}]}\n"
        "                    - {name: c, domains: [c]}\n"
    )
    at = "                http_filters:\n"
    found = tree(patch(changed((at, another + at))).text)
    _, host, empty = manager(found)["route_config"]["virtual_hosts"]
    assert host["typed_per_filter_config"] == OFF
    assert "typed_per_filter_config" not in empty


def test_patch_extends_settings_of_other_filters_and_headers() -> None:
    mine = "typed_per_filter_config: {x: {}}, route: { cluster: shop, timeout: 5s }"
    key = "early_header_mutation_extensions"
    text = changed(
        (
            "          route: { cluster: shop, timeout: 5s }",
            f"          {mine}".replace(", route", "\n                          route"),
        ),
        (
            "                stat_prefix: edge\n",
            f"                stat_prefix: edge\n                {key}: [{{name: m}}]\n",
        ),
    )
    found = tree(patch(text).text)
    assert routes(found)[0]["typed_per_filter_config"] == {"x": {}, **OFF}
    assert [one["name"] for one in manager(found)[key]] == [
        "m",
        "envoy.http.early_header_mutation.header_mutation",
    ]


def test_patch_makes_the_present_policy_the_fallback() -> None:
    theirs = "{policies: [{typed_extension_config: {name: mine}}]}"
    line = "lb_policy: ROUND_ROBIN  # fair"
    found = tree(patch(changed((line, f"load_balancing_policy: {theirs}"))).text)
    assert override(found)["fallback_policy"] == yaml.safe_load(theirs)
    found = tree(patch(changed((line, "lb_policy: MAGLEV"))).text)
    (kept,) = override(found)["fallback_policy"]["policies"]
    assert kept["typed_extension_config"]["typed_config"]["@type"].endswith("maglev.v3.Maglev")
    found = tree(patch(changed((f"      {line}\n", ""))).text)
    (least,) = override(found)["fallback_policy"]["policies"]
    assert least["typed_extension_config"]["name"].endswith("least_request")


def test_patch_hashes_sessions_in_the_fallback_where_the_configuration_asks_for_it() -> None:
    line, more = "lb_policy: ROUND_ROBIN  # fair", "envoy: {fallback: ring_hash}\n"
    found = tree(patch(more=more).text)
    (ring,) = override(found)["fallback_policy"]["policies"]
    assert ring["typed_extension_config"]["name"].endswith("ring_hash")
    hashed = [one["route"].get("hash_policy") for one in routes(found)]
    headers = [one["header"]["header_name"] for each in hashed for one in each or ()]
    assert headers == list(SESSION_HEADERS)
    mine = "hash_policy: [{connection_properties: {source_ip: true}}]"
    at = "                            timeout: 0s\n"
    kept = tree(patch(changed((at, f"{at}                            {mine}\n")), more=more).text)
    assert str(kept).count("source_ip") == 1
    assert "x-session-id" not in str(routes(kept))
    theirs = "load_balancing_policy: {policies: [{typed_extension_config: {name: mine}}]}"
    (note,) = patch(changed((line, theirs)), more=more).notes
    assert note.endswith(
        "keeps its own fallback, so envoy.fallback: ring_hash is not used; remove it"
    )
    (again,) = patch(patch().text, more=more).notes
    assert again == note


def test_patch_keeps_an_override_that_also_names_the_served_endpoint() -> None:
    text = patch(more="accounting: {responses: headers}\n").text
    assert "Needs Envoy 1.38 or newer" in text
    (filters, *_) = [one for one in manager(tree(text))["http_filters"] if one["name"] == FILTER]
    without = text.replace(yaml.safe_dump(filters["name"]).strip(), FILTER)
    assert "selected_host_key" in override(tree(without))
    mine = tree(text)
    manager(mine)["http_filters"].pop(1)
    again = patched(yaml.safe_dump(mine), "f", config(), PatchOptions())
    assert "selected_host_key" in override(tree(again.text))


def test_patch_keeps_present_outlier_detection_and_retries() -> None:
    line = "      lb_policy: ROUND_ROBIN  # fair\n"
    mine = "      outlier_detection: {consecutive_5xx: 7}\n      circuit_breakers: {}\n"
    found = tree(patch(changed((line, line + mine))).text)
    assert cluster(found, "engines")["outlier_detection"] == {"consecutive_5xx": 7}
    assert cluster(found, "engines")["circuit_breakers"] == {}
    at = '                      domains: ["*"]\n'
    limit = "                      request_body_buffer_limit: 5\n"
    found = tree(patch(changed((at, at + limit))).text)
    assert "request_body_buffer_limit" not in routes(found)[1]


@pytest.mark.parametrize("mine", ["common_http_protocol_options: {}", "http2_protocol_options: {}"])
def test_patch_closes_idle_connections_unless_the_cluster_says_how_it_speaks(mine: str) -> None:
    line = "      lb_policy: ROUND_ROBIN  # fair\n"
    found = tree(patch().text)
    assert "idle_timeout" in str(cluster(found, "engines")["typed_extension_protocol_options"])
    found = tree(patch(changed((line, f"{line}      {mine}\n"))).text)
    assert "typed_extension_protocol_options" not in cluster(found, "engines")


def test_patch_adds_fields_to_json_access_logs_on_request() -> None:
    assert "kvsteer_picked" not in patch().text
    (log,) = manager(tree(patch(choice=PatchOptions(access_log=True)).text))["access_log"]
    fields = log["typed_config"]["log_format"]["json_format"]
    assert next(iter(fields)) == "path"
    assert set(fields) == {"path", *LOG_FIELDS}
    text = changed(("json_format:\n", "text_format:\n"))
    found = patch(text, PatchOptions(access_log=True))
    (note,) = found.notes
    assert "has no JSON access log; to a text format, add %DYNAMIC_METADATA(envoy.lb:" in note


SECOND = """
    - name: second
      filter_chains:
        - filters: [{name: tcp}]
      default_filter_chain:
        filters:
          - name: hcm
            typed_config:
              "@type": type.googleapis.com/x.v3.HttpConnectionManager
              route_config: {virtual_hosts: [{name: a, domains: ["*"], routes: [
                {match: {prefix: /}, route: {cluster: engines, timeout: 1s}}]}]}
              http_filters: [{name: envoy.filters.http.router}]

  clusters:
"""


def test_patch_changes_each_listener_of_the_workers_or_the_named_one() -> None:
    text = changed(("\n  clusters:\n", SECOND))

    def filters(choice: PatchOptions) -> int:
        return json.dumps(tree(patch(text, choice).text)).count(f'{{"name": "{FILTER}"')

    assert filters(PatchOptions()) == 2
    assert filters(PatchOptions(listener="second")) == 1


def test_patch_finds_the_cluster_by_its_workers_or_its_name() -> None:
    pipe = "{endpoint: {address: {pipe: {path: /x}}}}"
    with_pipe = changed(("endpoints: [{lb_endpoints: [", f"endpoints: [{{lb_endpoints: [{pipe}, "))
    assert "override_host" in str(cluster(tree(patch(with_pipe).text), "engines"))
    other = 'workers: [{endpoint: "10.0.0.9:80"}]\n'
    mine = parse("models: [{name: m}]\n" + other, "c")
    shown = r"no cluster has the address of a configured worker \(10.0.0.9:80\): correct `workers`"
    with pytest.raises(ConfigError, match=shown):
        patched(USER, "f", mine, PatchOptions())
    found = patched(USER, "f", mine, PatchOptions(clusters=("engines",)))
    assert found.notes == [
        "10.0.0.9:80: not an endpoint of cluster engines; requests picked for them go elsewhere"
    ]
    only = changed(("{ cluster: shop, timeout: 5s }", "{ cluster: engines }"))
    assert "override_host" in str(
        cluster(tree(patched(only, "f", mine, PatchOptions()).text), "engines")
    )


HOLD = "policy: {{hold: {{enabled: true, bound_seconds: {}}}}}\n"
STAT = "                stat_prefix: edge\n"


def limited(limits: str, seconds: int) -> Patch:
    """The file with limits in its connection manager, for a router that holds so long."""
    text = changed((STAT, f"{STAT}                {limits}\n")) if limits else USER
    return patch(text, more=HOLD.format(seconds))


def test_patch_lets_requests_wait_for_a_hold() -> None:
    found = tree(limited("", 120).text)
    (settings,) = [one for one in manager(found)["http_filters"] if one["name"] == FILTER]
    assert settings["typed_config"]["max_message_timeout"] == "130s"
    assert [one["route"].get("idle_timeout") for one in routes(found)] == [None, None]
    assert patch(more=HOLD.format(120).replace("true", "false")).text == patch().text


@pytest.mark.parametrize(
    ("limits", "seconds", "idle"),
    [
        ("", 600, "610s"),
        ("stream_idle_timeout: 60s", 120, "130s"),
        ("stream_idle_timeout: 0s", 600, None),
    ],
)
def test_patch_raises_the_idle_timeout_of_routes_to_workers_alone(
    limits: str, seconds: int, idle: str | None
) -> None:
    found = limited(limits, seconds)
    assert [one["route"].get("idle_timeout") for one in routes(tree(found.text))] == [None, idle]
    assert found.notes == []


def test_patch_notes_limits_that_end_held_requests() -> None:
    (note,) = limited("common_http_protocol_options: {max_stream_duration: 30s}", 120).notes
    shown = ": its max_stream_duration of 30 s ends requests that may wait for 130 s (policy.hold)"
    assert note.endswith(shown)


def test_patch_keeps_a_routes_own_idle_timeout_and_notes_it() -> None:
    mine = tree(USER)
    routes(mine)[1]["route"]["idle_timeout"] = "5s"
    found = patch(yaml.safe_dump(mine), more=HOLD.format(120))
    assert routes(tree(found.text))[1]["route"]["idle_timeout"] == "5s"
    assert any("route: its idle_timeout of 5 s ends" in note for note in found.notes)


LB = "lb_policy: ROUND_ROBIN  # fair"
SHOP = "route: { cluster: shop, timeout: 5s }"
TYPED = f"{' ' * 26}typed_per_filter_config: {{{FILTER}: {{disabled: true}}}}\n"
NOTES = [
    ([("timeout: 0s\n", "# none\n")], "", "has no timeout, so Envoy's default of 15 s applies"),
    ([("5xx,connect-failure", "retriable-4xx")], "", "does not retry on connect-failure"),
    ([(SHOP, "route: {cluster_header: x}")], "", "chooses its cluster by the request"),
    (
        [(SHOP, "route: {weighted_clusters: {clusters: [{cluster_header: x}]}}")],
        "",
        "chooses its cluster by the request",
    ),
    ([], "envoy: {eds_directory: /run}\n", "eds_directory is not used"),
    (
        [
            (
                "\n  clusters:\n",
                SECOND.replace("route_config: {v", "rds: {x: 1}\n              x: {v"),
            )
        ],
        "",
        "takes its routes from xDS",
    ),
]


def test_patch_notes_a_route_whose_requests_are_not_recognized() -> None:
    mine = tree(USER)
    for one in routes(mine):
        if one.get("route", {}).get("cluster") == "engines":
            one["match"], one["route"]["prefix_rewrite"] = {"prefix": "/llm/"}, "/"
    text, edits = yaml.safe_dump(mine), "isolation: {header: x-t, secret_file: s, fail: open}\n"
    shown = [one for one in patch(text, more=edits).notes if "path_prefixes: [/llm]" in one]
    assert shown
    assert shown[0].startswith("static_resources.listeners[0].filter_chains[0]")
    assert not patch(text).notes


def test_patch_notes_paths_that_stay_undecoded() -> None:
    text = changed(
        ("stat_prefix: edge", "stat_prefix: edge\n                normalize_path: false")
    )
    assert [note for note in patch(text).notes if "sets normalize_path: false" in note]


@pytest.mark.parametrize(("replacements", "more", "note"), NOTES)
def test_patch_notes_surprising_settings(
    replacements: list[tuple[str, str]], more: str, note: str
) -> None:
    (found,) = patch(changed(*replacements), more=more).notes
    assert note in found


def test_patch_names_the_first_of_many_workers_that_are_no_endpoints() -> None:
    many = [{"endpoint": f"10.0.0.{number}:80"} for number in range(9)]
    mine = parse(yaml.safe_dump({"models": [{"name": "m"}], "workers": many}), "c")
    (note,) = patched(USER, "f", mine, PatchOptions(clusters=("engines",))).notes
    assert note.startswith("10.0.0.0:80, ")
    assert "10.0.0.4:80 and 4 more: not an endpoint of cluster engines" in note


def test_patch_does_not_compare_a_cluster_with_dynamic_endpoints() -> None:
    mine = tree(USER)
    del cluster(mine, "engines")["load_assignment"]
    cluster(mine, "engines")["cluster_type"] = {"name": "envoy.cluster.eds"}
    text = yaml.safe_dump(mine)
    assert patch(text, PatchOptions(clusters=("engines",))).notes == []


@pytest.mark.parametrize(
    ("worker", "more", "said"),
    [
        ("vllm-1:8001", "", 1),
        ("vllm-1:8001", "envoy: {router: 'kvsteer:9002'}", 0),
        ("vllm-1:8001", "extproc: {listen: 'unix:/run/kvsteer.sock'}", 0),
        ("localhost:8001", "", 0),
        ("vllm-1.example.com:8001", "", 0),
    ],
)
def test_patch_notes_a_loopback_router_beside_workers_in_containers(
    worker: str, more: str, said: int
) -> None:
    mine = parse(f'models: [{{name: m}}]\nworkers: [{{endpoint: "{worker}"}}]\n{more}', "c")
    notes = patched(USER, "f", mine, PatchOptions(clusters=("engines",))).notes
    assert sum("at 127.0.0.1:9002, which is Envoy's own host" in note for note in notes) == said


def test_patch_accepts_a_cluster_for_each_of_several_models() -> None:
    mine = parse(
        "models: [{name: m}, {name: n}]\n"
        'workers: [{endpoint: "127.0.0.1:8001", model: m}, {endpoint: "127.0.0.1:7000", model: n}]',
        "c",
    )
    found = patched(USER, "f", mine, PatchOptions())
    for name in ("engines", "shop"):
        assert "override_host" in str(cluster(tree(found.text), name))
    assert "several models" in found.notes[-1]


DYNAMIC = "dynamic_resources: {lds_config: {}, cds_config: {ads: {}}}\n"
HCM = ".http_connection_manager.v3.HttpConnectionManager"
REFUSED: list[tuple[list[tuple[str, str]] | str, PatchOptions, str, str]] = [
    ("[]", PatchOptions(), "", "is not an envoy.yaml: it must be a mapping"),
    ("static_resources: []", PatchOptions(), "", "static_resources: a mapping was expected"),
    (DYNAMIC, PatchOptions(), "", "has no static_resources"),
    (f"{DYNAMIC}static_resources: {{}}", PatchOptions(), "", "its listeners come from LDS"),
    ("static_resources: {listeners: 5}", PatchOptions(), "", "a list of mappings was expected"),
    (
        "static_resources: {}",
        PatchOptions(),
        "",
        "has no static listener with an HttpConnectionManager",
    ),
    ("staticResources: {}", PatchOptions(), "", "write staticResources as static_resources"),
    ([(HCM, ".tcp_proxy.v3.TcpProxy")], PatchOptions(), "", "with an HttpConnectionManager"),
    ([], PatchOptions(listener="x"), "", "has no listener 'x' but edge"),
    ([], PatchOptions(clusters=("x",)), "", "has no static cluster 'x' but engines, shop"),
    ([("admin:", f"{DYNAMIC}admin:")], PatchOptions(clusters=("x",)), "", "clusters from CDS"),
    ([("- name: shop\n", "- name: engines\n")], PatchOptions(), "", "have the same name"),
    ([("route_config:", "x:")], PatchOptions(), "", "has no static route that leads to a cluster"),
    (
        [("cluster: engines   # vLLM", "cluster: shop")],
        PatchOptions(clusters=("engines",)),
        "",
        "no static route leads to the cluster 'engines'",
    ),
    ([(LB, "type: LOGICAL_DNS")], PatchOptions(), "", "is of the type LOGICAL_DNS"),
    ([(LB, "lb_subset_config: {}")], PatchOptions(), "", "lb_subset_config cannot be combined"),
    ([(LB, "ring_hash_lb_config: {}")], PatchOptions(), "", "write it as load_balancing_policy"),
    (
        [(LB, "lb_policy: CLUSTER_PROVIDED")],
        PatchOptions(),
        "",
        "CLUSTER_PROVIDED is not supported",
    ),
    (
        [(LB, "load_balancing_policy: {policies: [{x: v3.OverrideHost}]}")],
        PatchOptions(),
        "",
        "already has an override_host with other settings",
    ),
    (
        [("- name: shop\n", "- name: kvsteer\n")],
        PatchOptions(),
        "",
        "a cluster 'kvsteer' already exists",
    ),
    ([("http.lua\n", "http.ext_proc\n")], PatchOptions(), "", "already exists with other settings"),
    (
        [("filters.http.lua.v3.Lua\n", "x.ExternalProcessor\n                      y: kvsteer\n")],
        PatchOptions(),
        "",
        "already asks 'kvsteer' under another name",
    ),
    (
        [("http.router\n", "x\n"), ("http.router.v3.Router", "x")],
        PatchOptions(),
        "",
        "has no envoy.filters.http.router to put the filter before",
    ),
    ([('domains: ["*"]', "matcher: {}")], PatchOptions(), "", "chooses routes by a matcher"),
    (
        [("virtual_hosts:", "vhds: {}\n                  virtual_hosts:")],
        PatchOptions(),
        "",
        "from VHDS",
    ),
    (
        [("                          route:\n", f"{TYPED}                          route:\n")],
        PatchOptions(),
        "",
        "is set on routes to the workers",
    ),
    (
        [(SHOP, SHOP + "\n" + TYPED.replace("disabled", "x").rstrip())],
        PatchOptions(),
        "",
        "is already set, with other settings",
    ),
    (
        [],
        PatchOptions(),
        "disaggregation: {mode: header}\n",
        "the configuration has disaggregation",
    ),
    ([], PatchOptions(), "extproc: {tls: {certificate: c, key: k}}\n", "envoy.router_tls: missing"),
]


@pytest.mark.parametrize(("given", "choice", "more", "why"), REFUSED)
def test_patch_refuses_unknown_structures(
    given: list[tuple[str, str]] | str, choice: PatchOptions, more: str, why: str
) -> None:
    text = given if isinstance(given, str) else changed(*given)
    assert why in refusal(text, choice, more)


def test_patch_command_prints_only_the_error_of_a_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = tmp_path / "kvsteer.yaml", tmp_path / "envoy.yaml"
    mine.write_text(CONFIG)
    command = ["envoy", "--config", str(mine), "--patch", str(theirs)]
    for raw, why in (
        (b"static_resources: {}\n", "has no static listener"),
        (b"\xff", "is not UTF-8 text"),
        (b"#" * 1_048_577, "larger than 1048576 bytes"),
    ):
        theirs.write_bytes(raw)
        assert main(command) == 2
        out, error = capsys.readouterr()
        assert (out, why in error) == ("", True)
    theirs.unlink()
    assert main(command) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    assert main([*command[:3], "--diff"]) == 2
    assert "belong to --patch" in capsys.readouterr().err


def test_patch_command_prints_the_file_or_a_diff_and_notes_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = tmp_path / "kvsteer.yaml", tmp_path / "envoy.yaml"
    mine.write_text(CONFIG)
    theirs.write_text(changed(("timeout: 0s\n", "# none\n")).removesuffix("\n"))
    command = ["envoy", "--config", str(mine), "--patch", str(theirs)]
    assert main(command) == 0
    out, error = capsys.readouterr()
    assert "timeout" in error
    assert tree(out)["static_resources"]["clusters"][-1]["name"] == "kvsteer"
    assert main([*command, "--diff"]) == 0
    assert capsys.readouterr().out == difference(theirs.read_text(), out, str(theirs))
    theirs.write_text(out)
    assert main(command) == 0
    assert capsys.readouterr() == (
        out,
        error + f"{theirs}: KVSteer is already in it; nothing changed\n",
    )


def test_difference_marks_a_missing_newline_at_the_end() -> None:
    assert difference("a", "a\nb\n", "f").splitlines()[3:] == [
        "-a",
        "\\ No newline at end of file",
        "+a",
        "+b",
    ]


LINES = USER.splitlines(keepends=True)
WORDS = re.findall(r"[\w.@:]+", USER)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["cut", "twice", "word", "junk"]),
            st.integers(0, len(LINES) - 1),
            st.sampled_from([*WORDS, "[]", "{}", "5", "null", "&a", "*a", "<<: 1", "- x", ": "]),
            st.text(max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_patch_never_raises_another_error_for_a_broken_file(
    faults: list[tuple[str, int, str, str]],
) -> None:
    lines = list(LINES)
    for kind, at, word, junk in faults:
        place = min(at, len(lines) - 1)
        if kind == "cut":
            del lines[place]
        elif kind == "twice":
            lines.insert(place, lines[place])
        elif kind == "word":
            new = word.replace("\\", r"\\")
            lines[place] = re.sub(r"[\w.@:]+(?=\W*$)", new, lines[place], count=1)
        else:
            lines[place] = lines[place].rstrip("\n") + junk + "\n"
    text = "".join(lines)
    try:
        found = patched(text, "f", config(), PatchOptions())
    except ConfigError as error:
        assert str(error).startswith("f: ")  # noqa: PT017 - or it is none
        return
    lines = difference(text, found.text, "f").splitlines()[2:]
    gone = [line.rstrip() for line in lines if line.startswith("-")]
    # to add to a list or mapping in brackets, its line is replaced
    assert all(re.search(r"lb_policy|:$|null$|[]}]", line) for line in gone)


def test_patch_asks_which_of_several_clusters_has_the_workers() -> None:
    of_shop = CONFIG.replace("8002", "7000")
    with pytest.raises(ConfigError, match="which cluster has the workers: engines, shop"):
        patched(USER, "f", parse(of_shop, "c"), PatchOptions())
