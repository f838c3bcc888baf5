"""Where workers are found while the router runs: sources, and the one view made of theirs."""
