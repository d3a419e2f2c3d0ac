"""What a family of models can do: told from its config and tried on a miniature, before weights are read."""
