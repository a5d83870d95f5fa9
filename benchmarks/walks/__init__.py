"""Five walks through the package, as a reader makes them: how many modules a question leads through."""
