"""The computation of one microbatch: its policy, forward, loss and backward, and its evaluation."""
