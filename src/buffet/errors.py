"""The one error class for what a user can do wrong."""

LONGEST = 1000
"""Longer messages quote something endless: their middle is left out."""


class BuffetError(Exception):
    """A request that cannot be carried out.

    The message says, in one line, what is wrong, where, what was found and how to mend it. The command
    line prints it and exits with code 2; library users may catch it.
    """

    def __init__(self, message: str) -> None:
        half = LONGEST // 2 - 2
        super().__init__(message if len(message) <= LONGEST else f"{message[:half]} … {message[-half:]}")
