"""Another name for `agentfly.aio.threads`."""

from ..aio.threads import WorkerThread


class OwnThread(WorkerThread):
    """A `WorkerThread` with the old name of `abandon`."""

    leave = WorkerThread.abandon
