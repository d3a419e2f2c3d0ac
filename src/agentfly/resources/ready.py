"""Another name for `agentfly.resources.spec.make_ready`."""

from .spec import make_ready as make_ready
