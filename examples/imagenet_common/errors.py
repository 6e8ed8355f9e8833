"""The one exception that a user of the examples is meant to see."""


class UserError(Exception):
    """Bad input: the message is one line that names what was given and what is allowed."""
