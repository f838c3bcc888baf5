"""Checks on live traffic whether KVSteer's tokens are the engine's."""
