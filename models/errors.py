"""The one error that a user can mend."""


class UserError(Exception):
    """An error that the user can mend: one clear sentence, shown without a traceback."""
