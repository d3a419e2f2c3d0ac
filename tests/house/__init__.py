"""The house guards itself: the plan of the package in `rooms.py`, and tests that fail where the code leaves it."""
