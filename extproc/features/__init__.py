"""Optional parts of routing, each in a folder of its own; `serving.enabled_features` lists them."""
