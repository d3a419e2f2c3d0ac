"""The learner's room: trajectories come in, better weights come out.

    samples     trajectory -> training rows, the only place a mask is made         (no torch)
    settings    what can be set, and what is refused                               (no torch)
    advantages  rewards -> advantages, pure functions                              (NumPy)
    algorithms  the table: which advantage, which settings it reads, which paper   (NumPy)
    losses      clipped surrogate, value loss, KL estimators, aggregation          (torch)
    batching    rows -> micro batches with little padding                          (torch)
    backbone    hidden states, with the rows' common prefix run once               (torch)
    logprobs    log-probs of given tokens without a [tokens, vocabulary] tensor    (torch)
    optim       AdamW, full-precision masters, the learning rate's schedule        (torch)
    critic      the value model of PPO                                             (torch)
    learner     one update: samples, advantages, passes, version + 1               (torch)
    supervised  the same rows and masks, trained by likelihood                     (torch)
    storage     trainer state to and from one file                                 (torch)

Importing this package loads none of them, so that a list of algorithms costs no torch.
"""
