"""The one exception for mistakes a user can mend.

Entries print its text without a traceback and exit with status 2, so the text must say
what is wrong, where, and what to type instead.
"""


class UserError(Exception):
    """A mistake with its remedy, in words for the person at the keyboard."""
