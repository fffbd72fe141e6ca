"""The one error of this tool: a single line that says which rule broke and what to do."""


class ForkError(Exception):
    """A rule was broken; `str()` is one line for the user. Exit status 1."""

    status = 1


class UsageError(ForkError):
    """The request names something that does not exist (a base, a patch, a device). Exit status 2."""

    status = 2


def one_line(text: str, limit: int = 300) -> str:
    """The last line of `text` that says something, cut to `limit` characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:limit] if lines else "no message"
