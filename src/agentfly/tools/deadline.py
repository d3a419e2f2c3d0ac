"""Another name for `agentfly.aio.deadline`."""

from ..aio.deadline import GRACE_S as GRACE_S
from ..aio.deadline import Expired as Expired
from ..aio.deadline import within as within
