"""Where pictures and reports go: checked before whatever takes long is begun."""

from __future__ import annotations

from pathlib import Path

from manylora.exceptions import ValidationError


def check(flag: str, path: str, *endings: str) -> None:
    """Check that a picture can be written.

    Args:
        flag: what it was given by.
        path: the file.
        endings: what it may end in. `.png` needs matplotlib; `.htm` goes for `.html`.

    Raises:
        ValidationError: it has another ending, its folder is not there, or what draws PNG is not installed.

    """
    ending = {".htm": ".html"}.get(Path(path).suffix.lower(), Path(path).suffix.lower())
    if ending not in endings:
        *first, last = endings
        raise ValidationError(f"{flag} `{path}` must end in {', '.join(first)} or {last}")
    check_place(flag, path)
    if ending == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            others = " and ".join(other for other in endings if other != ".png")
            raise ValidationError(
                f"{flag} `{path}` needs matplotlib: `pip install manylora[plots]`; for {others} nothing is needed"
            ) from None


def check_place(flag: str, path: str) -> None:
    """Check that a file can be written there.

    Raises:
        ValidationError: its folder is not there, or it is a folder itself.

    """
    if not Path(path).absolute().parent.is_dir():
        raise ValidationError(f"{flag} `{path}`: there is no folder `{Path(path).parent}`")
    if Path(path).is_dir():
        raise ValidationError(f"{flag} `{path}` is a folder; a file is needed")
