"""What everything else stands on: addresses, errors, faults, header names, shares of bounds, logs.

What stands here is needed by rooms that know nothing of each other: the exception tree of requests
(`errors`), the one way to say that something is wrong now (`fault`), the names of the headers that
the router owns (`headers`), how an amount is shared (`shares`), and how lines are logged (`logs`).

It may know what a host, a file, a header and an engine's release are. It knows no configuration, no
request and no worker, and imports nothing of other rooms but errors of `kvstate`.

The rule: a word, a key or a bound that two rooms have to agree on stands here once. What only one
room needs belongs into that room.
"""
