"""Rollout workers: processes that hold one replica of the sampler each and run chains with it.

    trainer's process                                          worker process i
    Trainer -> GroupStream -> WorkerPool.run  -- chain ------>  RolloutWorker: engine, renderer, environments, chains
                              WorkerPool      <- trajectory --
    Learner -> WorkerEngine.publish  -- weights, probe ------>  engine.take_weights
                                     <- answer ---------------

A turn of a chain costs no message: a chain is one message to the worker and one back. `fleet` starts and watches the processes.
"""
