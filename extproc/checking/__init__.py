"""Whether our tokens are the engine's: found out on live traffic."""
