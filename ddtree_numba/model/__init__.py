"""A small, really trained MLA target and block drafter, and their NumPy forward."""
