"""The shape ledger: its shapes are those of the arrays, its boxes are its bytes."""

import numpy as np
from matplotlib.patches import Rectangle

from ddtree_numba import reference
from ddtree_numba.viz import ledger_figure, mla_ledger
from ddtree_numba.viz.ledger import KIMI

SMALL = {"N": 3, "H": 2, "S": 4, "Dn": 5, "Dv": 6, "Dc": 7, "Dr": 8}


def test_the_shapes_are_those_of_the_reference():
    s = SMALL
    q_nope = np.zeros((1, s["N"], s["H"], s["Dn"]))
    q_rope = np.zeros((1, s["N"], s["H"], s["Dr"]))
    cache = np.zeros((1, s["S"] + s["N"], s["Dc"] + s["Dr"]), np.float32)
    w_uk = np.zeros((s["H"], s["Dn"], s["Dc"]))
    w_uv = np.zeros((s["H"], s["Dv"], s["Dc"]))
    rows = np.array([s["S"]]), np.ones((1, s["N"], 1), np.uint32)
    q = reference.absorb_query(q_nope, q_rope, w_uk)
    latent, _ = reference.verify_attn(q, cache, *rows, sm_scale=1.0, d_latent=s["Dc"])
    out = reference.verify_attn_unabsorbed(
        q_nope, q_rope, cache, *rows, w_uk, w_uv, sm_scale=1.0
    )
    ledger = mla_ledger(SMALL).drop_duplicates("array").set_index("array")["shape"]
    for name, x in {
        "absorbed q": q[0], "latent out": latent[0], "out": out[0], "cache": cache[0],
        "W_UK": w_uk, "W_UV": w_uv,
    }.items():  # fmt: skip
        assert ledger[name] == x.shape, name
    keys = np.einsum("tc,hec->the", cache[0, :, : s["Dc"]], w_uk)
    assert ledger["keys"] == keys.shape


def test_at_kimis_sizes_the_expanded_form_is_28_caches():
    size = mla_ledger().drop_duplicates("array").set_index("array")["bytes"]
    ratio = (size["keys"] + size["values"]) / size["cache"]
    assert ratio == KIMI["H"] * (128 + 128) / (512 + 64)


def test_the_area_of_a_box_is_its_bytes():
    ledger = mla_ledger()
    figure, alt_text = ledger_figure(ledger)
    for ax, form in zip(figure.axes, ("naive", "absorbed"), strict=True):
        rows = ledger[ledger["form"] == form]
        boxes = [p for p in ax.patches if isinstance(p, Rectangle)][: len(rows)]
        areas = sorted(box.get_width() * box.get_height() for box in boxes)
        np.testing.assert_allclose(areas, sorted(rows["bytes"]))
    assert "naive 297 MB" in alt_text and "absorbed 32.2 MB" in alt_text
