"""A model as one rank holds it: slices, structure, construction without memory."""
