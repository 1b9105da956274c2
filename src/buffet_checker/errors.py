"""The two ways in which a check ends early."""

from __future__ import annotations


class BadInputError(Exception):
    """The input cannot be judged at all: no such file, another model, a network that is not
    supported.
    """


class RejectedError(Exception):
    """The certificate does not prove what it claims; the message names the first place where it fails."""
