"""One exception for everything a user can mend: its message is one line that names the culprit and the way out."""


class LocaterError(Exception):
    """Bad input. The command line prints the message on one line and exits with status 2."""
