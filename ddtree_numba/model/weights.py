"""Weight files of the small model: KDTR, fp16, with the configuration inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddtree_numba import kdtr
from ddtree_numba.model.config import ModelConfig

Weights = dict[str, NDArray[np.float64]]


def save_weights(
    path: str | Path, config: ModelConfig, weights: Mapping[str, ArrayLike]
) -> None:
    """Write one network's weights as fp16, with the configuration as JSON bytes.

    Parameters
    ----------
    path
        The file; replaced whole or not at all.
    config
        Stored as tensor ``config`` (u8).
    weights
        Tensors named and shaped as `ModelConfig.target_shapes` or `drafter_shapes`.
    """
    tensors = {name: np.asarray(w, np.float16) for name, w in weights.items()}
    settings = np.frombuffer(config.to_json().encode(), np.uint8)
    kdtr.save(path, {"config": settings, **tensors})


def load_weights(path: str | Path, part: str) -> tuple[ModelConfig, Weights]:
    """Read one network's weights, every checksum and shape checked.

    Parameters
    ----------
    path
        A file that `save_weights` wrote.
    part
        ``"target"`` or ``"drafter"``: which tensors the file must hold.

    Returns
    -------
    config, weights
        Weights as float64 arrays in memory.

    Raises
    ------
    KdtrError
        If the file is missing or damaged.
    ValueError
        If it is sound but holds another network, or what is none.
    """
    hint = "restore data/model/ from the repository, or train it again (model/train.py)"
    if not Path(path).is_file():
        raise kdtr.KdtrError(path, None, f"no such weight file; {hint}")
    try:
        kdtr.verify(path)
    except kdtr.KdtrError as error:
        reason = f"{error.reason}; {hint}"
        raise kdtr.KdtrError(error.file, error.tensor, reason) from error
    tensors = kdtr.load(path)
    if "config" not in tensors:
        raise ValueError(f"{path}: not a weight file (no tensor 'config'); {hint}")
    try:
        config = ModelConfig.from_json(bytes(tensors["config"]).decode())
    except ValueError as error:
        raise ValueError(f"{path}: tensor 'config': {error}; {hint}") from error
    shapes = config.target_shapes() if part == "target" else config.drafter_shapes()
    for name, shape in shapes.items():
        if name not in tensors or tensors[name].shape != shape:
            found = tensors[name].shape if name in tensors else "nothing"
            raise ValueError(
                f"{path}: {part} weight {name!r} must have shape {shape}, found "
                f"{found}; {hint}"
            )
        if tensors[name].dtype.kind != "f" or not np.isfinite(tensors[name]).all():
            raise ValueError(
                f"{path}: {part} weight {name!r} ({tensors[name].dtype}) must hold "
                f"finite floats; {hint}"
            )
    return config, {name: tensors[name].astype(np.float64) for name in shapes}
