"""One exception for everything a user can mend: its message is one line that names the culprit and the way out."""


class LocaterError(Exception):
    """Bad input. The command line prints the message on one line and exits with status 2."""


def first_line(error: BaseException) -> str:
    """What an exception from elsewhere says, on one line; its kind where it says nothing."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
