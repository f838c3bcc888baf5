"""Why a connection ends."""


class Http2Error(Exception):
    """A peer violated HTTP/2, so its connection ends; code: from RFC 9113, section 7."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
