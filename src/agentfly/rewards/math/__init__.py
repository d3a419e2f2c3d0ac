"""Judging answers to mathematical questions, with our own reading of them or with the package math-verify."""
