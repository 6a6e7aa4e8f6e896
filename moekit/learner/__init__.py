"""The learner: gradients, optimizer, and the weights that they act on."""
