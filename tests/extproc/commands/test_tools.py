import argparse

from extproc.commands.router_url import DEFAULT_ADMIN, add_admin
from extproc.commands.tools import INSTALL, installed_tools, load_tool, missing


def test_installed_tool_adds_its_options_and_what_runs_it() -> None:
    parser = argparse.ArgumentParser()
    add_arguments = load_tool("report")
    assert add_arguments is not None
    add_arguments(parser)
    assert callable(parser.parse_args([]).run)


def test_tool_that_is_not_installed_is_none() -> None:
    assert "no-such-tool" not in installed_tools()
    assert load_tool("no-such-tool") is None
    assert missing("no-such-tool").endswith(f"{INSTALL} in a clone")


def test_router_is_named_by_one_option_of_several_names() -> None:
    parser = argparse.ArgumentParser()
    add_admin(parser, "--url")
    assert parser.parse_args([]).admin == DEFAULT_ADMIN
    assert parser.parse_args(["--url", "http://a:1"]).admin == "http://a:1"
