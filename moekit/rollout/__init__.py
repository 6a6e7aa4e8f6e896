"""Answers from a policy: engines behind one protocol, and what they hand to training."""
