"""Another name for `agentfly.aio.threads`."""

from ..aio.threads import Abandoned as Abandoned
from ..aio.threads import run_in_thread as run_in_thread
