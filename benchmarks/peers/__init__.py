"""Claims about other frameworks, each with a line of its release."""
