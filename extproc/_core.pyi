from extproc.http2.session import Session, SharedBudget

def CompiledBudget(max_bytes: int, /) -> SharedBudget: ...  # noqa: N802
def CompiledSession(  # noqa: N802
    limits: tuple[int, ...], max_message_bytes: int, budget: SharedBudget, /
) -> Session: ...
