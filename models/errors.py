"""The one error that a user can mend, and the end that somebody else asked for."""


class UserError(Exception):
    """An error that the user can mend: one clear sentence, shown without a traceback."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, as a scheduler or a service sends it: what is under way stops as at Ctrl-C."""
