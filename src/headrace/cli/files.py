"""Files that a command leaves for others to read: whole, or as they were before."""

from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Writes beside `path` and renames: nobody ever reads a part. Its folder is made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(path.name + ".staged")
    staged.write_bytes(content)
    staged.replace(path)
