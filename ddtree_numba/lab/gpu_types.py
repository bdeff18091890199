"""What Numba types a kernel for the GPU; needs neither a GPU nor CUDA's compiler."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types
from numba.np.numpy_support import from_dtype

if TYPE_CHECKING:
    import pandas as pd


def _compile(function: Callable, signature: tuple) -> Any:
    """Numba's typed form of a kernel, as `cuda.jit` makes it for sm_90."""
    from numba.cuda.compiler import compile_cuda

    return compile_cuda(function, types.void, signature, cc=(9, 0)).type_annotation


def types_of(kernel: Any, signature: tuple) -> dict[str, str]:
    """Types of a kernel's variables, in the order of their first appearance.

    Parameters
    ----------
    kernel : a `cuda.jit` kernel
    signature : tuple of numba types
        Of its arguments.
    """
    annotation = _compile(kernel.py_func, signature)
    found: dict[str, str] = {}
    for name in kernel.py_func.__code__.co_varnames:
        kinds = {
            str(types.unliteral(kind))
            for variable, kind in annotation.typemap.items()
            if variable.partition(".")[0] == name
        }
        if kinds:
            found[name] = " or ".join(sorted(kinds))
    return found


def float64_lines(kernel: Any, signature: tuple) -> list[tuple[int, str]]:
    """Lines of a kernel that compute something in float64, in order.

    Parameters
    ----------
    kernel, signature
        As for `types_of`.

    Returns
    -------
    list of (int, str)
        Line, counted from the kernel's ``def`` as 1, and its text. A literal that is
        only handed to a cast does not count.
    """
    function = kernel.py_func
    annotation = _compile(function, signature)
    numbers = set()
    for block in annotation.blocks.values():
        for step in block.body:
            # By name: numba and numba-cuda have a class each.
            if type(step).__name__ != "Assign":
                continue
            what = getattr(step.value, "op", type(step.value).__name__)
            if what in ("Var", "phi"):
                continue  # a copy computes nothing
            literal = what == "Const" and step.target.is_temp
            if annotation.typemap[step.target.name] == types.float64 and not literal:
                numbers.add(step.loc.line)
    lines, first = inspect.getsourcelines(function)
    start = next(n for n, line in enumerate(lines) if line.lstrip().startswith("def "))
    return [
        (n - first - start + 1, lines[n - first].strip())
        for n in sorted(numbers)
        if first <= n < first + len(lines)
    ]


def expression_types(values: Mapping[str, Any], *texts: str) -> pd.DataFrame:
    """What expressions are in NumPy, and in a kernel.

    Parameters
    ----------
    values : mapping of str to NumPy scalar
        The names that the expressions use.
    *texts : str

    Returns
    -------
    pandas.DataFrame
        Columns NumPy and GPU, a row an expression.
    """
    import pandas as pd

    signature = tuple(from_dtype(np.asarray(x).dtype) for x in values.values())
    rows = {}
    for text in texts:
        code = f"def kernel({', '.join(values)}):\n    result = {text}\n"
        scope: dict[str, Any] = {"math": math, "np": np}
        exec(code, scope)  # only what the notebook's author wrote
        kind = _compile(scope["kernel"], signature).typemap["result"]
        with np.errstate(all="ignore"):
            here = np.asarray(eval(text, {"math": math, "np": np}, dict(values))).dtype
        rows[text] = {"NumPy": str(here), "GPU": str(kind)}
    return pd.DataFrame(rows).T
