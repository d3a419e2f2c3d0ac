"""The learner over several ranks: one process per rank, each with a shard of the parameters and of the optimizer (FSDP2).

    environment   rank and size from the variables of torchrun                                    (no torch)
    group         the process group: commands of rank 0, sums, agreement about errors
    learner       `RankLearner`: rank 0 leads, `follow` runs on the other ranks

    rank 0      update ----> gather rows, send ----> score, credit, steps -----> metrics, errors
                               | command               | collectives
    ranks 1..   follow ----> receive ------------> score,         steps -----> wait for the next command

Every rank holds the flat tensors of all sampled tokens and runs the same code; only micro batches differ.
"""
