"""What the package adds to Lightning's strategies and process groups."""
