"""The learner: trajectories in, updated weights out.

    settings    the keys of [loss], [train] and [lora], and their checks            (no torch)
    samples     trajectory -> training rows; the only place that makes a mask       (no torch)
    algorithms/ advantages, losses, the objective, the table of algorithms          (NumPy, torch)
    batching    rows -> micro batches with little padding                           (torch)
    experience  the sampled tokens of one step as flat tensors                      (torch)
    backbone    hidden states; a common prefix of the rows runs once                (torch)
    model/      log-probs of tokens, the critic, LoRA, saving and loading           (torch)
    optim       AdamW, float32 masters, loss scaling                                (torch)
    learner     one update: samples, advantages, optimizer steps, version + 1       (torch)
    ranks/      the learner sharded over several processes                          (torch)
    supervised  the same rows and masks, trained by likelihood                      (torch)

Importing this package loads none of them.
"""
