"""The one exception that stands for the user's input rather than for a defect of ours."""


class UserError(Exception):
    """Bad input: the command line prints the message as one line and exits with code 2.

    The message says what was found, where, what was expected and what to do about it.
    """
