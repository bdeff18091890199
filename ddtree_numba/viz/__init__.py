"""Pictures from arrays, traces and tables: trees, masks, what lanes do, what it takes.

Every function returns ``(figure, alt_text)``. Colours are Okabe and Ito's, and never
the only cue: the accepted path is also thick and square, other lines are dashed, cells
dotted. Figures are built without pyplot, so they need no display and leave no state.
"""

from ddtree_numba.viz.access import access_figure
from ddtree_numba.viz.film import show_film
from ddtree_numba.viz.heap import heap_animation, heap_figure
from ddtree_numba.viz.lanes import lanes_figure
from ddtree_numba.viz.ledger import ledger_figure, mla_ledger
from ddtree_numba.viz.left_out import left_out_figure
from ddtree_numba.viz.link import link_figure
from ddtree_numba.viz.masks import mask_figure, round_figure
from ddtree_numba.viz.memory import memory_figure
from ddtree_numba.viz.online import online_figure
from ddtree_numba.viz.payoff import accepted_figure, speedup_figure
from ddtree_numba.viz.reads import element_reads, reads_figure, times_figure
from ddtree_numba.viz.roofline import ladder_figure, roofline_figure
from ddtree_numba.viz.show import show
from ddtree_numba.viz.splits import splits_figure
from ddtree_numba.viz.sums import sums_figure
from ddtree_numba.viz.sweep import sweep_figure
from ddtree_numba.viz.timeline import gain_figure, stages_figure, timeline_figure
from ddtree_numba.viz.trees import tree_figure
from ddtree_numba.viz.walk import accept_figure, compact_figure

__all__ = [
    "accept_figure",
    "accepted_figure",
    "access_figure",
    "compact_figure",
    "element_reads",
    "gain_figure",
    "heap_animation",
    "heap_figure",
    "ladder_figure",
    "lanes_figure",
    "ledger_figure",
    "left_out_figure",
    "link_figure",
    "mask_figure",
    "memory_figure",
    "mla_ledger",
    "online_figure",
    "reads_figure",
    "roofline_figure",
    "round_figure",
    "show",
    "show_film",
    "speedup_figure",
    "splits_figure",
    "stages_figure",
    "sums_figure",
    "sweep_figure",
    "timeline_figure",
    "times_figure",
    "tree_figure",
]
