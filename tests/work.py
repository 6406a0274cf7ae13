"""Counts the work of Python code, so that tests of complexity do not measure time."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(function: Callable[[], Any]) -> int:
    """Returns the number of lines and calls that Python runs in a function."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
