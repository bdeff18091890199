"""`python -m ddtree_numba` is the `ddtree` command."""

from ddtree_numba.cli import main

raise SystemExit(main())
