"""The user that an agent talks to, played by a model: `env = "user"`."""
