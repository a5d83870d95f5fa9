"""The step loop and the parts that it is made of."""
