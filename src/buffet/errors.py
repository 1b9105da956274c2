"""The one error class for what a user can do wrong."""


class BuffetError(Exception):
    """A request that cannot be carried out.

    The message says, in one line, what is wrong, where, what was found and how to mend it. The command
    line prints it and exits with code 2; library users may catch it.
    """
