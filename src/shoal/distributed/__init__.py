"""Process groups, agreement, and collectives."""
