"""`python -m ddtree_numba` is the `ddtree` command.

NumPy's matrix library reads its number of threads when it is loaded, so the package
itself must not load NumPy before this file sets it.
"""

import os

# A round's products are small: one thread does them as fast as two, and on busy cores
# threads that wait for each other took ten times as long.
for _library in ("OPENBLAS", "MKL", "OMP"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")


def main() -> int:
    """Run the command; an interrupt while it is loaded ends it as quietly as later."""
    try:
        from ddtree_numba import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
