"""One module a notebook: its exercise, solution, cases, and wrong answers."""
