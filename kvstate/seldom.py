"""Which occurrences of something frequent are logged: the 1st, 2nd, 4th, 8th and so on.

A peer that fails again and again would fill the log otherwise.
"""


def is_logged(count: int) -> bool:
    """Whether the occurrence of this number is one of these.

    count: of the occurrences so far, this one included.
    """
    return count.bit_count() == 1
