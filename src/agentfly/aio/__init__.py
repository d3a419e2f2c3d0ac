"""Building blocks for asyncio: deadlines, waiting lines and threads.

deadline    within(coroutine, timeout_s): a timeout for one await; the deadlines of an event loop in one heap
wait_line   WaitLine: a FIFO queue of waiters with deadlines and safe cancellation
threads     WorkerThread: a dedicated thread; run_in_thread: a call in a pooled thread
"""
