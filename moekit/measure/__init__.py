"""What a step did and what it cost: routed rows, load, FLOPs, saved bytes, the run record and its card."""
