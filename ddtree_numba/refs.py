"""Golden cases: inputs and right outputs of every stage, in ``data/refs/*.kdtr``.

For whoever writes such kernels, here or elsewhere: a case is one file, its outputs come
from `ddtree_numba.reference`, and its inputs are made of PCG64's raw bits by exact
arithmetic, so that they are the same on every machine. Tensors in a file:

=================== ================================================================
``in.<argument>``   an argument of the stage; 0-d for numbers; uint16 is bf16 bits
``out.<name>``      a right output
``seed``            large cases: what `RECIPES` makes the inputs from again
``crc.in.<name>``   large cases: CRC-32 of an input's bytes, in place of the input
``crc.out.<name>``  large cases: CRC-32 of an output that is exact, in its place
``sample.rows``,    large cases of verify_attn: the tree rows and the heads whose output
``sample.heads``    is kept, ``out.out`` is [B, rows, heads, Dc]
=================== ================================================================

``ddtree refs`` writes them again, and a test shows that it writes what is committed.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ddtree_numba import bf16, kdtr, reference
from ddtree_numba._data import data_path
from ddtree_numba.tree import DraftTree

MLA_SCALE = 0.07216878364870322  # 192 ** -0.5, written out: pow differs by platform
KIMI_SCALE = 0.144680
KERNELS = ("topk", "argmax", "tree_build", "verify_attn", "tree_accept", "kv_compact")

# What a stage returns, where that has no names of its own.
_OUTPUTS = {
    "topk": ("log_probs", "token_ids"),
    "argmax": ("tokens",),
    "sample": ("tokens",),
    "verify_attn": ("out", "lse"),
    "merge_partials": ("out", "lse"),
}

Arrays = dict[str, np.ndarray]
Arguments = dict[str, Any]


# --------------------------------------------------------------------- using the cases


@dataclass(frozen=True)
class Case:
    """One golden case, as `load` gives it.

    Attributes
    ----------
    name : str
        The file's name without its ending; it begins with the stage.
    stage : str
    arguments : dict
        By name, as `ddtree_numba.reference` takes them; for tree_accept the tree's
        fields instead of the tree.
    expected : dict of str to ndarray
        Right outputs; those of a sampled case at its rows and heads only.
    crcs : dict of str to int
        CRC-32 of right outputs that are exact and not kept.
    rows, heads : ndarray, optional
        What a large case of verify_attn keeps.
    large : bool
        Whether the inputs were made from a seed; too many for an emulator.
    """

    name: str
    stage: str
    arguments: Arguments
    expected: Arrays
    crcs: dict[str, int] = field(default_factory=dict)
    rows: np.ndarray | None = None
    heads: np.ndarray | None = None
    large: bool = False


def load(path: Path | str) -> Case:
    """Read one case; a large one's inputs are made again from its seed.

    Raises
    ------
    KdtrError
        If the file is damaged, or inputs made again are not those of the file.
    """
    path = Path(path)
    kdtr.verify(path)
    tensors = kdtr.load(path)

    def group(prefix: str) -> Arrays:
        return {
            name.removeprefix(prefix): x
            for name, x in tensors.items()
            if name.startswith(prefix)
        }

    arguments = {name: _number_or_array(x) for name, x in group("in.").items()}
    if crcs := group("crc.in."):
        made = RECIPES[path.stem].make(Numbers(int(tensors["seed"])))
        for name, crc in crcs.items():
            if _crc(made[name]) != crc:
                raise kdtr.KdtrError(path, name, "made again, it has another CRC-32")
            arguments[name] = made[name]
    return Case(
        name=path.stem,
        stage=path.stem.partition("-")[0],
        arguments=arguments,
        expected=group("out."),
        crcs={name: int(crc) for name, crc in group("crc.out.").items()},
        rows=tensors.get("sample.rows"),
        heads=tensors.get("sample.heads"),
        large="seed" in tensors,
    )


def iter_cases(directory: Path | str | None = None) -> Iterator[Case]:
    """Every case of a directory (the package's own if omitted), by name."""
    for path in sorted(Path(directory or data_path("refs")).glob("*.kdtr")):
        yield load(path)


def run(case: Case, executor: str, **options: Any) -> Arrays:
    """Run a case's stage on its inputs; outputs by name, sampled as the file's are.

    Parameters
    ----------
    case : Case
    executor : {"gpu", "emulator", "numpy"}
        "numpy" is `ddtree_numba.reference` itself, of which a sampled case asks only
        what it keeps.
    **options
        For the stage's kernel wrapper, such as ``version="simple"``.
    """
    if executor == "numpy":
        return _sampled_reference(case.stage, case.arguments, case.rows, case.heads)
    if case.stage not in KERNELS:
        raise ValueError(f"stage {case.stage} has no kernel; expected one of {KERNELS}")
    module = importlib.import_module(f"ddtree_numba.kernels.{case.stage}")
    stage = getattr(module, case.stage)
    found = _call(stage, case.stage, case.arguments, executor=executor, **options)
    if case.rows is not None and case.heads is not None:
        found = {name: x[:, case.rows][:, :, case.heads] for name, x in found.items()}
    return found


def differences(case: Case, found: Arrays, *, tolerance: float = 0.0) -> list[str]:
    """What is wrong with a stage's outputs, a line each; empty if nothing is.

    Parameters
    ----------
    case : Case
    found : dict of str to ndarray
        Outputs by name, as `run` gives them.
    tolerance : float
        For float outputs: ``|found - expected| <= tolerance * (1 + |expected|)``.
        Integers, infinities and NaN are to be equal.
    """
    wrong = []
    for name, expected in case.expected.items():
        x = found[name]
        if x.shape != expected.shape or x.dtype != expected.dtype:
            wrong.append(
                f"{name} is {x.dtype} {x.shape}; expected {expected.dtype} "
                f"{expected.shape}"
            )
            continue
        close = x == expected
        if expected.dtype.kind == "f":
            with np.errstate(invalid="ignore"):  # inf - inf
                near = np.abs(x - expected) <= tolerance * (1 + np.abs(expected))
            close = close | near | (np.isnan(x) & np.isnan(expected))
        if not close.all():
            where = tuple(int(i) for i in np.argwhere(~close)[0])
            wrong.append(
                f"{name}{list(where)} is {x[where]}; expected {expected[where]} "
                f"({np.count_nonzero(~close)} of {close.size} differ)"
            )
    for name, crc in case.crcs.items():
        if _crc(found[name]) != crc:
            wrong.append(
                f"{name} has CRC-32 {_crc(found[name]):08x}; expected {crc:08x}"
            )
    return wrong


def write_refs(directory: Path | str) -> list[Path]:
    """Write every case to a directory; return the files' paths."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, recipe in tqdm(RECIPES.items(), desc="golden cases", unit="case"):
        path = directory / f"{name}.kdtr"
        tensors = recipe.tensors(name)
        bits = [key for key, x in tensors.items() if x.dtype == np.uint16]
        kdtr.save(path, tensors, bf16=bits)
        paths.append(path)
    return paths


# ------------------------------------------------------------------------ making a case


class Numbers:
    """Arrays that are the same everywhere: raw bits of PCG64 and exact arithmetic."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.PCG64(seed)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
        """int32 in low … high - 1."""
        raw = self._generator.random_raw(int(np.prod(shape)))
        return (low + (raw % np.uint64(high - low)).astype(np.int32)).reshape(shape)

    def normals(self, shape: tuple[int, ...], dtype: str = "f32") -> np.ndarray:
        """Bell-shaped multiples of 1/128 with a standard deviation of 1.15.

        Sums of four random bytes, as float32, float16 or (rounded) bf16 bits.
        """
        raw = self._generator.random_raw(-(-int(np.prod(shape)) // 2)).astype("<u8")
        sums = raw.view("i1").reshape(-1, 4).sum(axis=1, dtype=np.int16)
        x = (sums[: int(np.prod(shape))].astype(np.float32) / 128).reshape(shape)
        return _stored(x, dtype)


def _stored(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return bf16.from_float32(x)
    return x.astype({"f32": np.float32, "f16": np.float16}[dtype])


@dataclass(frozen=True)
class Recipe:
    """How a case is made.

    Attributes
    ----------
    stage : str
    make : callable
        Arguments of the stage, by name.
    large : bool
        Keep seed and CRCs of array inputs instead of the inputs.
    rows, heads : sequence of int, optional
        Keep the output of these tree rows and heads only (verify_attn).
    exact : tuple of str
        Outputs of which a CRC is kept and not the array.
    """

    stage: str
    make: Callable[[Numbers], Arguments]
    large: bool = False
    rows: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    exact: tuple[str, ...] = ()

    def tensors(self, name: str) -> Arrays:
        """Everything that the case's file holds."""
        seed = zlib.crc32(name.encode())
        arguments = self.make(Numbers(seed))
        kept: Arrays = {"seed": np.array(seed, np.int64)} if self.large else {}
        for key, x in arguments.items():
            if self.large and isinstance(x, np.ndarray):
                kept[f"crc.in.{key}"] = np.array(_crc(x), np.uint32)
            else:
                kept[f"in.{key}"] = np.asarray(x)
        rows, heads = (
            None if x is None else np.array(x, np.int32)
            for x in (self.rows, self.heads)
        )
        if rows is not None and heads is not None:
            kept |= {"sample.rows": rows, "sample.heads": heads}
        outputs = _sampled_reference(self.stage, arguments, rows, heads)
        for key, x in outputs.items():
            if key in self.exact:
                kept[f"crc.out.{key}"] = np.array(_crc(x), np.uint32)
            else:
                kept[f"out.{key}"] = x
        return kept


def _sampled_reference(
    stage: str,
    arguments: Arguments,
    rows: np.ndarray | None,
    heads: np.ndarray | None,
) -> Arrays:
    """The reference's outputs; of some rows and heads, if they are given."""
    if rows is not None and heads is not None:
        some = {
            "q": arguments["q"][:, rows][:, :, heads],
            "visibility": arguments["visibility"][:, rows],
        }
        arguments = {**arguments, **some}
    return _call(getattr(reference, stage), stage, arguments)


def _call(
    function: Callable, stage: str, arguments: Arguments, **options: Any
) -> Arrays:
    """Call a stage (a reference or a kernel's wrapper); its outputs by name."""
    arguments = {**arguments, **options}
    if stage == "kv_compact":
        cache = arguments["kv_cache"] = arguments["kv_cache"].copy()
        return {"prefix_lens": function(**arguments), "kv_cache": cache}
    if stage == "tree_accept":
        tree = DraftTree.from_parents([[-1]])
        fields = {key: arguments.pop(key) for key in vars(tree) if key in arguments}
        arguments["tree"] = DraftTree(**{**vars(tree), **fields})
        return function(**arguments)._asdict()
    result = function(**arguments)
    if isinstance(result, DraftTree):
        return dict(vars(result))
    outputs = result if isinstance(result, tuple) else (result,)
    return dict(zip(_OUTPUTS[stage], outputs, strict=True))


def _crc(x: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data)


def _number_or_array(x: np.ndarray) -> Any:
    return x.item() if x.ndim == 0 else x


# --------------------------------------------------------------------------- the cases

RECIPES: dict[str, Recipe] = {}


def _add(name: str, make: Callable[[Numbers], Arguments], **kept: Any) -> None:
    RECIPES[name] = Recipe(name.partition("-")[0], make, **kept)


def _add_topk_and_argmax() -> None:
    def topk(shape: tuple[int, ...], dtype: str, k: int) -> Callable:
        return lambda numbers: {"logits": numbers.normals(shape, dtype), "k": k}

    def bad_rows(numbers: Numbers) -> Arguments:
        logits = numbers.normals((2, 3, 20))
        logits[0, 1, 7], logits[1, 0, 3], logits[1, 2] = np.nan, np.inf, -np.inf
        return {"logits": logits, "k": 4, "check": False}

    def masked(numbers: Numbers) -> Arguments:
        logits = numbers.normals((1, 4, 40))
        logits[:, :, ::3] = -np.inf
        return {"logits": logits, "k": 40}

    def ragged(numbers: Numbers) -> Arguments:
        logits = numbers.normals((3, 5, 50), "f16")
        logits[1, 2:] = np.nan  # padding is not looked at
        return {"logits": logits, "n_rows": np.array([5, 2, 1], np.int32)}

    _add("topk-f32-v256-k16", topk((2, 3, 256), "f32", 16))
    _add("topk-f16-v300-k5", topk((1, 4, 300), "f16", 5))
    _add("topk-bf16-v256-k64-ties", topk((1, 3, 256), "bf16", 64))
    _add("topk-v3-k4-keeps-3", topk((1, 2, 3), "f32", 4))
    _add("topk-masked-tokens", masked)
    _add("topk-bad-rows-unchecked", bad_rows)
    _add("topk-bf16-v163840-k64", topk((1, 15, 163840), "bf16", 64), large=True)
    _add("argmax-f32-v1000", lambda n: {"logits": n.normals((1, 3, 1000))})
    _add("argmax-bf16-v256-ties", lambda n: {"logits": n.normals((1, 4, 256), "bf16")})
    _add("argmax-f16-ragged", ragged)
    _add(
        "argmax-bf16-v163840",
        lambda n: {"logits": n.normals((1, 9, 163840), "bf16")},
        large=True,
    )

    def sample(numbers: Numbers) -> Arguments:
        positions = np.array([[7, 8, 9, 8], [0, 1, 1, 2]], np.int32)
        logits = numbers.normals((2, 4, 50))
        return dict(logits=logits, temperature=0.7, positions=positions, seed=11)

    _add("sample-t07", sample)


def _falling(numbers: Numbers, batch: int, length: int, kept: int, unit: int) -> Arrays:
    """Candidates that fall by multiples of 2**-unit: few and coarse ones tie a lot."""
    steps = numbers.integers(0, 2 ** (unit - 3), (batch, length, kept))
    log_probs = -np.cumsum(steps, axis=-1) / 2.0**unit - 0.125
    tokens = numbers.integers(0, 50000, (batch, length, 1)) + np.arange(kept)
    return dict(
        log_probs=log_probs.astype(np.float32), token_ids=tokens.astype(np.int32)
    )


def _add_tree_build() -> None:
    def build(shape: tuple[int, int, int], m: Any, unit: int = 22) -> Callable:
        return lambda n: {**_falling(n, *shape, unit), "n_draft_nodes": m}

    def given(p: list, m: int) -> Callable:
        log_probs = np.array([p], np.float32)
        tokens = np.broadcast_to(np.arange(log_probs.shape[2]), log_probs.shape)
        return _always(
            dict(
                log_probs=log_probs, token_ids=tokens.astype(np.int32), n_draft_nodes=m
            )
        )

    def nan_request(numbers: Numbers) -> Arguments:
        table = _falling(numbers, 2, 3, 4, 22)
        table["log_probs"][1, 2, 0] = np.nan
        return {**table, "n_draft_nodes": 6, "check": False}

    def roots(numbers: Numbers) -> Arguments:
        table = _falling(numbers, 5, 6, 8, 5)
        return {
            **table,
            "n_draft_nodes": np.array([0, 1, 17, 32, 33], np.int32),
            "root_tokens": np.array([3, 1, 4, 1, 5], np.int32),
        }

    # ln of .6 .3 .1 and .8 .1 .1
    worked = [
        [-0.5108256, -1.2039728, -2.3025851],
        [-0.22314355, -2.3025851, -2.3025851],
    ]
    zero_mass = [[-0.6931472, -np.inf, -np.inf]] * 2
    _add("tree_build-worked-example", given(worked, 4))
    _add("tree_build-zero-mass", given(zero_mass, 4))
    _add("tree_build-small-product", given([[-0.6931472] * 2] * 3, 100))
    _add("tree_build-all-ties-v2-m4", given([[-0.6931472] * 2] * 2, 4))
    _add("tree_build-m64-l15", build((1, 15, 64), 64))
    _add("tree_build-m64-l15-ties", build((2, 15, 64), 64, unit=5))
    _add("tree_build-chain-k1", build((1, 15, 1), 15))
    _add("tree_build-star-l1", build((1, 1, 40), 33))
    _add("tree_build-ragged-budgets", roots)
    _add("tree_build-nan-request", nan_request)
    _add("tree_build-m1024-l15", build((1, 15, 1024), 1024))
    _add("tree_build-m1024-l15-ties", build((1, 15, 1024), 1024, unit=5))


def _parents(shape: str, n: int, numbers: Numbers) -> list[int]:
    """Parent rows: a chain, wide (eight children a node), deep (two chains), random."""
    if shape == "chain":
        return list(range(-1, n - 1))
    if shape == "wide":
        return [-1, *((i - 1) // 8 for i in range(1, n))]
    if shape == "deep":
        return [-1, *(max(0, i - 2) for i in range(1, n))]
    drawn = numbers.integers(0, 2**30, (n,))  # "random"
    return [-1, *(int(drawn[i]) % i for i in range(1, n))]


def _attention(
    *,
    heads: int,
    prefix: list[int],
    rows: list[int],
    shape: str,
    dtype: str = "f32",
    sm_scale: float = MLA_SCALE,
    d: int = 576,
    d_latent: int = 512,
) -> Callable[[Numbers], Arguments]:
    """Arguments of verify_attn; what lies past a request's tail is NaN."""
    n, batch = max(rows), len(rows)
    s_max = max(map(int.__add__, prefix, rows)) + 1

    def make(numbers: Numbers) -> Arguments:
        parents = [_parents(shape, n, numbers)] * batch
        cache = numbers.normals((batch, s_max, d))
        for b in range(batch):
            cache[b, prefix[b] + rows[b] :] = np.nan
        return dict(
            q=numbers.normals((batch, n, heads, d), dtype),
            kv_cache=_stored(cache, dtype),
            prefix_lens=np.array(prefix, np.int32),
            visibility=DraftTree.from_parents(parents, n_rows=rows).visibility,
            sm_scale=sm_scale,
            d_latent=d_latent,
        )

    return make


def _add_attention() -> None:
    def big_negative(numbers: Numbers) -> Arguments:
        q = np.zeros((1, 1, 1, 576), np.float32)
        q[..., :512] = 64
        return dict(
            q=q,
            kv_cache=np.repeat(-q[:, 0], 4, axis=1),
            prefix_lens=np.array([3], np.int32),
            visibility=np.ones((1, 1, 1), np.uint32),
            sm_scale=MLA_SCALE,
            d_latent=512,
        )

    _add("verify_attn-big-negative", big_negative)
    ragged: Arguments = dict(prefix=[0, 5], rows=[33, 20], heads=1)
    tiny: dict[str, Arguments] = {
        "tiny-chain": dict(prefix=[3], rows=[5], heads=3, shape="chain"),
        "tiny-no-prefix": dict(prefix=[0], rows=[9], heads=2, shape="wide"),
        "tiny-kimi-scale": dict(
            prefix=[5], rows=[9], heads=2, shape="deep", sm_scale=KIMI_SCALE
        ),
        "tiny-ragged-n33": dict(**ragged, shape="random"),
        "tiny-ragged-n33-bf16": dict(**ragged, shape="wide", dtype="bf16"),
    }
    for name, options in tiny.items():
        make = _attention(d=8, d_latent=6, **options)
        _add(f"verify_attn-{name}", make)

    for heads, prefix, n, shape, dtype in (
        (8, 0, 33, "wide", "f32"),
        (8, 17, 33, "deep", "f32"),
        (8, 1024, 65, "wide", "bf16"),
        (12, 640, 129, "random", "f32"),
        (16, 97, 33, "chain", "f32"),
        (16, 2048, 33, "random", "bf16"),
        (64, 512, 33, "chain", "bf16"),
        (64, 2048, 33, "wide", "f32"),
        (64, 2048, 33, "deep", "f32"),
        (64, 2048, 33, "wide", "bf16"),
        (64, 1, 1, "chain", "f32"),
    ):
        _add_sampled(
            f"h{heads}-s{prefix}-n{n}-{shape}-{dtype}",
            n,
            heads,
            _attention(
                heads=heads, prefix=[prefix], rows=[n], shape=shape, dtype=dtype
            ),
        )
    ragged = dict(prefix=[0, 300, 2048], rows=[33, 1, 20], shape="random")
    _add_sampled("h16-ragged-n33-f32", 33, 16, _attention(heads=16, **ragged))

    def partials(numbers: Numbers) -> Arguments:
        outs, lses = numbers.normals((4, 3, 5)), numbers.normals((4, 3))
        lses[1, 0], lses[:, 2] = -np.inf, -np.inf
        outs[1, 0] = np.nan  # of an empty part: may be anything
        return dict(outs=outs, lses=lses)

    _add("merge_partials-some-empty", partials)


def _add_sampled(name: str, n: int, heads: int, make: Callable) -> None:
    rows = tuple(sorted({0, n // 2, n - 1} | ({31, 32} if n > 32 else set())))
    some_heads = tuple(sorted({0, heads // 2, heads - 1}))
    _add(f"verify_attn-{name}", make, large=True, rows=rows, heads=some_heads)


def _always(arguments: Arguments) -> Callable[[Numbers], Arguments]:
    return lambda numbers: arguments


def _walk(parents: list, tokens: Any, targets: Any, **changes: Any) -> Arguments:
    """Arguments of tree_accept, with some pointers of the tree changed."""
    tree = DraftTree.from_parents(parents, tokens, n_rows=changes.pop("n_rows", None))
    for name, (index, value) in changes.items():
        getattr(tree, name)[0, index] = value
    names = ("token_ids", "next_token", "next_sibling", "n_rows")
    fields = {name: getattr(tree, name) for name in names}
    return {**fields, "target_tokens": np.atleast_2d(np.array(targets, np.int32))}


def _add_accept_and_compact() -> None:
    def lengths(numbers: Numbers) -> Arguments:
        """Request b's target follows the only path of eight rows for b + 1 of them."""
        parents = [-1, 0, 0, 1, 2, 3, 3, 5, 6, 7, 9, 10]
        path = [0, 1, 3, 5, 7, 9, 10, 11]
        targets = numbers.integers(100, 200, (8, 12))
        for b in range(8):
            targets[b, path[:b]] = path[1 : b + 1]
        return {**_walk([parents] * 8, range(12), targets), "max_depth": 15}

    def wide(numbers: Numbers) -> Arguments:
        parents = [_parents("random", 1025, numbers) for _ in range(4)]
        tokens = numbers.integers(0, 3, (4, 1025))
        return _walk(parents, tokens, numbers.integers(0, 3, (4, 1025)))

    worked = [-1, 0, 1, 0, 3], [10, 11, 12, 13, 12], [13, 0, 0, 12, 14]
    star = [-1, 0, 0, 0]
    fixed: dict[str, Arguments] = {
        "worked-example": _walk(*worked),
        "cycle": _walk(star, range(4), [9] * 4, next_sibling=(2, 1)),
        "out-of-range": _walk(star, range(4), [9] * 4, next_sibling=(1, -7)),
        "pad-token": _walk(star, [9, 5, 0, 0], [0] * 4, n_rows=[2]),
        "duplicate-siblings": _walk(star, [9, 7, 7, 7], [7, 1, 2, 3]),
        "other-branch": _walk([-1, 0, 0, 2], range(4), [3, 9, 9, 9]),
        "no-target": _walk(star, range(4), [-1] * 4),
    }
    for name, arguments in fixed.items():
        _add(f"tree_accept-{name}", _always(arguments))
    _add("tree_accept-lengths-1-to-8", lengths)
    _add("tree_accept-n1025", wide)

    def compact(numbers: Numbers, cache: np.ndarray, width: int = 8) -> Arguments:
        batch, s_max = cache.shape[-3:-1]
        rows = np.cumsum(numbers.integers(1, 4, (batch, width)), axis=1) - 1
        return dict(
            kv_cache=cache,
            prefix_lens=numbers.integers(0, s_max - 3 * width, (batch,)),
            rows=rows.astype(np.int32),
            accept_len=np.arange(1, batch + 1, dtype=np.int32),
        )

    def a_c_d(numbers: Numbers) -> Arguments:
        return dict(
            kv_cache=np.arange(12, dtype=np.float32).reshape(1, 6, 2),
            prefix_lens=np.array([1], np.int32),
            rows=np.array([[0, 2, 3]], np.int32),
            accept_len=np.array([3], np.int32),
        )

    _add("kv_compact-rows-0-2-3", a_c_d)
    _add("kv_compact-lengths-1-to-8", lambda n: compact(n, n.normals((8, 40, 5))))
    _add(
        "kv_compact-layers-bf16", lambda n: compact(n, n.normals((3, 2, 40, 5), "bf16"))
    )
    _add(
        "kv_compact-4-layers-b8-s512-d576-bf16",
        lambda n: compact(n, n.normals((4, 8, 512, 576), "bf16")),
        large=True,
        exact=("kv_cache",),
    )


_add_topk_and_argmax()
_add_tree_build()
_add_attention()
_add_accept_and_compact()
