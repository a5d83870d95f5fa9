"""What a layout will send, hold and take, as formulas over integers: no torch, no processes."""
