"""The `shoal plan` command: from a job and a cluster to a plan, and what there is to say about it."""
