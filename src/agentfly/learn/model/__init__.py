"""What the learner does with a torch model: log-probs of tokens, the critic, low-rank adapters, and saving and loading."""
