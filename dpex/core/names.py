"""Names that users give, in a form that can be written everywhere: metrics, JSON, pages, terminals."""

from __future__ import annotations


def encodable(name: str) -> str:
    r"""The name as UTF-8 can hold it: a byte of a file name that is no UTF-8 becomes the six letters ``\udcff``.

    Names that differ stay different, but for those that hold such letters themselves.
    """
    return name.encode("utf-8", "backslashreplace").decode()
