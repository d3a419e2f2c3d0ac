"""The bytes of a stored trajectory: what is kept of values that are not plain data, and the packed format."""
