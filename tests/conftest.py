"""What holds for all tests."""

import os

from hypothesis import Phase, settings

# A property is true or not; how long one example takes on a busy machine says nothing.
# The explain phase traces every line: minutes, for a counterexample that is printed anyway.
PHASES = [phase for phase in Phase if phase is not Phase.explain]

# A run that turns red says that the change did it, so the examples of a run are always the same;
# `make explore` looks for others.
settings.register_profile("steady", deadline=None, phases=PHASES, derandomize=True)
settings.register_profile("explore", deadline=None, phases=PHASES, print_blob=True)
settings.load_profile(os.environ.get("KVSTEER_EXAMPLES", "steady"))
