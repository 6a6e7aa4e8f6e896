"""Objectives: functions from a microbatch and the model's outputs to loss terms; the learner owns the divisors."""
