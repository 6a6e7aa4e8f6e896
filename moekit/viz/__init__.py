"""Pictures of a batch, a run and a comparison: interactive in a notebook, and a static twin of every figure."""
