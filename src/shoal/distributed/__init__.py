"""Process groups, agreement, and sums over ranks."""
