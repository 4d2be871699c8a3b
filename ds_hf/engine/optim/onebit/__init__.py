"""1-bit Adam, 0/1 Adam and 1-bit LAMB: optimizers that average their momenta in one bit instead of gradients in 16."""
