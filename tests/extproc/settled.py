"""What is there at once, or is to be awaited."""

from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def settled(answer: T | Awaitable[T]) -> T:
    return await answer if isinstance(answer, Awaitable) else answer
