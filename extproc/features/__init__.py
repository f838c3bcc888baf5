"""Optional parts of routing, a folder each; `extproc.serving.enabled_features` lists them."""
