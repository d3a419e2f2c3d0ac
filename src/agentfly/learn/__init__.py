"""The learner: trajectories in, updated weights out.

    settings    the keys of [loss], [train] and [lora], and their checks            (no torch)
    samples     trajectory -> training rows; the only place that makes a mask       (no torch)
    algorithms/ advantages, losses, the table of algorithms                         (NumPy, torch)
    batching    rows -> micro batches with little padding                           (torch)
    group       what ranks do together; a single process does nothing               (torch)
    experience  the sampled tokens of one step as flat tensors                      (torch)
    model/      hidden states, log-probs, the critic, LoRA, shards, saving, loading (torch)
    optim/      the optimizers by name, float32 masters, loss scaling               (torch)
    update/     the parts of an update: micro batches, scores, losses, gradients    (torch)
    learner     one update: samples, advantages, optimizer steps, version + 1       (torch)
    ranks/      the processes that share one learner: rank 0 leads, others follow   (torch)
    supervised  the same rows and masks, trained by likelihood                      (torch)

Importing this package loads none of them.
"""
