"""Where the package's data lies: weights, prompts, golden cases, recorded runs."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_path(*parts: str) -> Path:
    """Path of a data file, in a checkout (`data/`) or in an installed wheel.

    Parameters
    ----------
    *parts : str
        Folders and file below `data/`, for example ``"model", "target.kdtr"``.

    Returns
    -------
    Path
        The path, whether or not it exists.
    """
    installed = _PACKAGE / "data"
    root = installed if installed.is_dir() else _PACKAGE.parent / "data"
    return root.joinpath(*parts)
