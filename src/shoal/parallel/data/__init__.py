"""Data parallelism: gradients of replicas summed, or pushed to servers."""
