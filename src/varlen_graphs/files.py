"""Files that appear as a whole."""

import os
import secrets
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in place of what is there, only once it is whole: readers find the old one or the new one.

    Several processes and threads may write the same one: each has an unfinished file of its own beside it, and the last
    one to finish stays.
    """
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except BaseException:  # an interrupt leaves nothing behind either
        unfinished.unlink(missing_ok=True)
        raise
