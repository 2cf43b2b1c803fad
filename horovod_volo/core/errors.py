"""The exception for mistakes of the user.

Entry points print its text without a traceback and exit with status 2. The text must therefore say what is
wrong, where, and what to type instead.
"""


class UserError(Exception):
    """A mistake that the user can correct; the message contains the remedy."""
