"""Lightning callbacks: exact loss weighting, and what a run shows of itself."""
