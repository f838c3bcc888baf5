"""What is computed again of a conversation that lives: evicted meanwhile, or moved."""

from extproc.routing.decision import Decision

# Why a live conversation's context is computed again: no worker holds half of what is its own, or
# it goes to another one.
EVICTED, MOVED = "evicted", "moved"


def recomputed_tokens(decision: Decision) -> tuple[str, float]:
    """Returns why a live conversation's context is computed again, and how much; "" if it is not.

    Less than half of what is the conversation's own counts only where it moves: the end of any
    prompt, which fills no block, is computed again as well. Requests that are left to the proxy do
    not count.
    """
    if not decision.is_steered:
        return "", 0.0
    belonging = decision.basis.belonging
    context = belonging.counted
    why = EVICTED if belonging.begins else MOVED if decision.worker != belonging.home else ""
    if context is None or not why:
        return "", 0.0
    held = decision.basis.claims_on(decision.worker).saved
    return why, max(0.0, context.own + context.shared - held)
