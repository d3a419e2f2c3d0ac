"""Retrieval over passages in this process: corpora on disk or in memory, and three rankings of them (BM25, dense, hybrid)."""
