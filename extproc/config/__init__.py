"""The configuration: one frozen object, validated once; docs/configuration.md lists every key."""
