"""One heavy package, one file: each is imported only when its name is asked for, and imports inward only."""
